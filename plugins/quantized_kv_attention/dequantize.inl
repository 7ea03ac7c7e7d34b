// Blocks of the cache as float. Included after functions.inl.

// Scales of `count` rows as floats, in the cache's order [count, groups].
static void load_factors(const uint16_t* scales, int count, float* factors) {
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) store(factors + i, load_half(scales + i));
  for (; i < count; i++) factors[i] = half_to_float(scales[i]);
}

// keys[d][i]: the block's key i, dequantized; keys from `count` on are 0.
static void load_keys(const CacheSide& side, int64_t at, int count, int dim, float* keys) {
  if (side.bits == 16) {
    const uint16_t* rows = static_cast<const uint16_t*>(side.rows) + at * dim;
    for (int i = 0; i < kBlock; i += kWidth) {
      const int n = count - i < 0 ? 0 : count - i < kWidth ? count - i : kWidth;
      transpose_half(rows + static_cast<int64_t>(i) * dim, n, dim, keys + i);
    }
    return;
  }
  const int groups = dim / side.group_size;
  alignas(64) float factors[kBlock * kMaxHeadDim / 8];
  alignas(64) float by_group[kMaxHeadDim / 8 * kBlock];  // [groups, kBlock], 0 from `count` on.
  load_factors(side.scales + at * groups, count * groups, factors);
  for (int g = 0; g < groups; g++) {
    for (int i = 0; i < count; i++) by_group[g * kBlock + i] = factors[i * groups + g];
    for (int i = count; i < kBlock; i++) by_group[g * kBlock + i] = 0;
  }
  const int8_t* rows = static_cast<const int8_t*>(side.rows) + at * dim;
  for (int i = 0; i < kBlock; i += kWidth) {
    const int n = count - i < 0 ? 0 : count - i < kWidth ? count - i : kWidth;
    transpose_int8(rows + static_cast<int64_t>(i) * dim, n, dim, by_group + i, side.group_size, keys + i);
  }
}

// values[i][d]: the block's value row i, dequantized.
static void load_values(const CacheSide& side, int64_t at, int count, int dim, int padded, float* values) {
  if (side.bits == 16) {
    const uint16_t* rows = static_cast<const uint16_t*>(side.rows) + at * dim;
    for (int i = 0; i < count; i++) {
      const uint16_t* row = rows + static_cast<int64_t>(i) * dim;
      float* out = values + static_cast<int64_t>(i) * padded;
      int d = 0;
      for (; d + kWidth <= dim; d += kWidth) store(out + d, load_half(row + d));
      if (d < dim) store(out + d, load_eight_half(row + d));
    }
    return;
  }
  const int groups = dim / side.group_size;
  const int8_t* rows = static_cast<const int8_t*>(side.rows) + at * dim;
  alignas(64) float factors[kBlock * kMaxHeadDim / 8];
  load_factors(side.scales + at * groups, count * groups, factors);
  for (int i = 0; i < count; i++) {
    const int8_t* row = rows + static_cast<int64_t>(i) * dim;
    float* out = values + static_cast<int64_t>(i) * padded;
    for (int g = 0, d = 0; g < groups; g++) {
      const Vector factor = splat(factors[i * groups + g]);
      const int end = d + side.group_size;
      for (; d + kWidth <= end; d += kWidth) store(out + d, load_int8(row + d) * factor);
      if (d < end) {  // Half a vector.
        store_eight(out + d, load_eight_int8(row + d) * factor);
        d = end;
      }
    }
    for (int d = dim; d < lanes(dim); d++) out[d] = 0;
  }
}
