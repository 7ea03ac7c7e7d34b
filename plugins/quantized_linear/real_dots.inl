// Dot products of float32 activations with a tile of 4-, 8- or 32-bit weights.
//
// Four running sums a row, by input feature modulo 4, added up at the end: in this order for every number of rows.

// weight * x of kWidth outputs for the four inputs from k on, into sums[r][0..3].
template <int R>
SPECEXPORT_INLINE void accumulate(const F* weights, const float* const* x, int64_t k, F (*sums)[4]) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++)
    for (int r = 0; r < R; r++) sums[r][j] = fma(weights[j], splat(x[r][k + j]), sums[r][j]);
}

template <int R>
SPECEXPORT_INLINE void store_sums(const F (*sums)[4], int lane, float* out) {
  for (int r = 0; r < R; r++)
    store(out + r * kTile + lane, (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]));
}

template <int R>
void float_weight_tile(const LinearConfig& config, const uint8_t* tile, const float* const* x, float* out) {
  const float* weights = reinterpret_cast<const float*>(tile);
  for (int lane = 0; lane < kTile; lane += kWidth) {
    F sums[R][4] = {};
    int64_t k = 0;
    for (; k + 4 <= config.in_features; k += 4) {
      F w[4];
      for (int j = 0; j < 4; j++) w[j] = load(weights + (k + j) * kTile + lane);
      accumulate<R>(w, x, k, sums);
    }
    for (int j = 0; k < config.in_features; k++, j++)
      for (int r = 0; r < R; r++)
        sums[r][j] = fma(load(weights + k * kTile + lane), splat(x[r][k]), sums[r][j]);
    store_sums<R>(sums, lane, out);
  }
}

template <int R, int kBits, bool kMinimum>
void dequantized_tile(const LinearConfig& config, const uint8_t* tile, const float* const* x, float* out) {
  constexpr int kGroupsPerLine = kMinimum ? 1 : 2;
  const int64_t groups = config.groups();
  const F zero = splat(kBits == 8 ? 128.0f : kMinimum ? 0.0f : 8.0f);
  for (int lane = 0; lane < kTile; lane += kWidth) {
    F sums[R][4] = {};
    const uint8_t* weights = tile;
    int64_t k = 0;
    for (int64_t group = 0; group < groups;) {
      const uint8_t* line = weights;
      weights += 64;
      for (int g = 0; g < kGroupsPerLine && group < groups; g++, group++) {
        const F scale = load_half(line + 32 * g + 2 * lane);
        const F minimum = kMinimum ? load_half(line + 32 + 2 * lane) : F{};
        for (int i = 0; i < config.group_size; i += kBits == 4 ? 8 : 4, weights += 64) {
          I packed;
          std::memcpy(&packed, weights + lane * 4, sizeof packed);
          F w[4];
#pragma GCC unroll 2
          for (int nibble = 0; nibble < (kBits == 4 ? 2 : 1); nibble++, k += 4) {
            for (int j = 0; j < 4; j++) {
              const I q = (packed >> (8 * j + 4 * nibble)) & (kBits == 4 ? 15 : 255);
              const F centred = to_float(q) - zero;  // exact, as is its product with the scale
              w[j] = kMinimum ? centred * scale + minimum : centred * scale;
            }
            accumulate<R>(w, x, k, sums);
          }
        }
      }
    }
    store_sums<R>(sums, lane, out);
  }
}

template <int R>
SPECEXPORT_INLINE void real_tile(const LinearConfig& config, const uint8_t* tile, const float* const* x, float* out) {
  if (config.bits == 32) return float_weight_tile<R>(config, tile, x, out);
  if (config.bits == 4) {
    if (config.has_minimum) return dequantized_tile<R, 4, true>(config, tile, x, out);
    return dequantized_tile<R, 4, false>(config, tile, x, out);
  }
  if (config.has_minimum) return dequantized_tile<R, 8, true>(config, tile, x, out);
  return dequantized_tile<R, 8, false>(config, tile, x, out);
}

// `rows` rows of float32 activations times one tile, to out [rows][16].
void real_block(const LinearConfig& config, const uint8_t* tile, const float* x, int rows, float* out) {
  const float* at[kRowBlock];
  for (int r = 0; r < rows; r++) at[r] = x + r * config.in_features;
  int r = 0;
  for (; r + 4 <= rows; r += 4) real_tile<4>(config, tile, at + r, out + r * kTile);
  for (; r < rows; r++) real_tile<1>(config, tile, at + r, out + r * kTile);
}
