// Dot products of query rows with a block of keys, and weighted sums of a block of values, in float.
// Included after dequantize.inl.

// scores[r][i] = sum over d of q[r][d] keys[d][i], for N vectors of keys.
template <int R, int N>
static inline void score_tile(const float* q, int dim, const float* keys, float* scores) {
  Vector sums[R][N];
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) sums[r][n] = splat(0);
  }
  for (int d = 0; d < dim; d++) {
    Vector key[N];
    for (int n = 0; n < N; n++) key[n] = load(keys + d * kBlock + n * kWidth);
    for (int r = 0; r < R; r++) {
      const Vector x = splat(q[r * dim + d]);
      for (int n = 0; n < N; n++) sums[r][n] = fma(x, key[n], sums[r][n]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) store(scores + r * kChunk + n * kWidth, sums[r][n]);
  }
}

// Where a tile finds values, kWidth channels of key i from d on: in a block of floats, or, when the block serves a
// single tile, in the cache itself. The product of an int8 and a float16 is exact in float32, so the bits are the same.
struct FloatValues {
  const float* values;
  int padded;
  Vector at(int i, int d) const { return load(values + i * padded + d); }
};
struct HalfValues {
  const uint16_t* rows;
  int dim;
  Vector at(int i, int d) const { return load_half(rows + i * dim + d); }
};
struct Int8Values {
  const int8_t* rows;
  const float* factors;
  int dim, group_size, groups;
  Vector at(int i, int d) const { return load_int8(rows + i * dim + d) * splat(factors[i * groups + d / group_size]); }
};

// sums[r][d] += sum over keys i in [first, end) of weights[r][i] value[i][d], for N vectors of channels from d on.
template <int R, int N, class Values>
static inline void weigh_tile(const float* weights, const Values& values, int first, int end, int d, int padded,
                              float* sums) {
  Vector total[R][N];
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) total[r][n] = load(sums + r * padded + d + n * kWidth);
  }
  for (int i = first; i < end; i++) {
    Vector value[N];
    for (int n = 0; n < N; n++) value[n] = values.at(i, d + n * kWidth);
    for (int r = 0; r < R; r++) {
      const Vector x = splat(weights[r * kChunk + i]);
      for (int n = 0; n < N; n++) total[r][n] = fma(x, value[n], total[r][n]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) store(sums + r * padded + d + n * kWidth, total[r][n]);
  }
}

template <int R>
static void score_rows(const float* q, int dim, const float* keys, float* scores) {
  for (int i = 0; i < kBlock; i += kKeyVectors * kWidth) score_tile<R, kKeyVectors>(q, dim, keys + i, scores + i);
}

template <int R, class Values>
static void weigh_rows(const float* weights, const Values& values, int first, int end, int dim, int padded,
                       float* sums) {
  int d = 0;
  for (; d + kKeyVectors * kWidth <= lanes(dim); d += kKeyVectors * kWidth)
    weigh_tile<R, kKeyVectors>(weights, values, first, end, d, padded, sums);
  for (; d < dim; d += kWidth) weigh_tile<R, 1>(weights, values, first, end, d, padded, sums);
}

static void score_some(int rows, const float* q, int dim, const float* keys, float* scores) {
  switch (rows) {
    case 1: return score_rows<1>(q, dim, keys, scores);
    case 2: return score_rows<2>(q, dim, keys, scores);
    case 3: return score_rows<3>(q, dim, keys, scores);
    case 4: return score_rows<4>(q, dim, keys, scores);
    case 5: return score_rows<5>(q, dim, keys, scores);
    default: return score_rows<6>(q, dim, keys, scores);
  }
}

template <class Values>
static void weigh_some(int rows, const float* weights, const Values& values, int first, int end, int dim, int padded,
                       float* sums) {
  switch (rows) {
    case 1: return weigh_rows<1>(weights, values, first, end, dim, padded, sums);
    case 2: return weigh_rows<2>(weights, values, first, end, dim, padded, sums);
    case 3: return weigh_rows<3>(weights, values, first, end, dim, padded, sums);
    case 4: return weigh_rows<4>(weights, values, first, end, dim, padded, sums);
    case 5: return weigh_rows<5>(weights, values, first, end, dim, padded, sums);
    default: return weigh_rows<6>(weights, values, first, end, dim, padded, sums);
  }
}
