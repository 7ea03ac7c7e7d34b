// Sums of products of bytes with AVX-512 VNNI: up to kTile rows, and kTile keys or channels side by side. One factor of
// the instruction has no sign: keys are packed plus 128 (kFlip), and what that adds is taken off; weights have no sign.
// Included after integer_planes.inl.

static inline __m512i four_bytes(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

template <int R>
static void store_dots(const __m512i (&sums)[kPlanes][R], int32_t* dots) {
  for (int p = 0; p < kPlanes; p++) {
    for (int r = 0; r < R; r++) _mm512_storeu_si512(dots + (p * kTile + r) * kTile, sums[p][r]);
  }
}

template <int R>
static void score_dots(const int8_t* queries, const int32_t* query_sums, const uint8_t* keys, int first, int end,
                       int dim, int32_t* dots) {
  __m512i sums[kPlanes][R];
  for (int p = 0; p < kPlanes; p++) {
    for (int r = 0; r < R; r++) sums[p][r] = _mm512_set1_epi32(-query_sums[p * kTile + r]);
  }
  for (int d = first; d < end; d += 4) {
    const __m512i key = _mm512_loadu_si512(keys + d * kTile);
    for (int p = 0; p < kPlanes; p++) {
      for (int r = 0; r < R; r++)
        sums[p][r] = _mm512_dpbusd_epi32(sums[p][r], key, four_bytes(queries + (p * kTile + r) * dim + d));
    }
  }
  store_dots<R>(sums, dots);
}

template <int R>
static void weigh_dots(const uint8_t* weights, const int8_t* values, int blocks, int dim, int32_t* dots) {
  __m512i sums[kPlanes][R] = {};
  for (int block = 0; block < blocks; block++, weights += kBlock, values += kBlock * dim) {
    for (int i = 0; i < kBlock; i += 4) {
      const __m512i value = _mm512_loadu_si512(values + i * kTile);
      for (int p = 0; p < kPlanes; p++) {
        for (int r = 0; r < R; r++)
          sums[p][r] = _mm512_dpbusd_epi32(sums[p][r], four_bytes(weights + (p * kTile + r) * kChunk + i), value);
      }
    }
  }
  store_dots<R>(sums, dots);
}

class Dots {
 public:
  static constexpr int kFlip = 0x80;

  explicit Dots(int /*key_group_size*/) {}
  void set_rows(int rows) { rows_ = rows; }

  // dots[plane][row][key] of channels [first, end) of a tile of rows with a tile of keys.
  void score(const int8_t* queries, const int32_t* query_sums, const uint8_t* keys, int first, int end, int dim,
             bool /*same_queries*/, int32_t* dots) const {
    for (int r = 0; r < rows_; r += kRows) {
      const int8_t* q = queries + r * dim;
      const int32_t* sums = query_sums + r;
      int32_t* out = dots + r * kTile;
      switch (rows_ - r) {
        case 1: score_dots<1>(q, sums, keys, first, end, dim, out); break;
        case 2: score_dots<2>(q, sums, keys, first, end, dim, out); break;
        case 3: score_dots<3>(q, sums, keys, first, end, dim, out); break;
        case 4: score_dots<4>(q, sums, keys, first, end, dim, out); break;
        case 5: score_dots<5>(q, sums, keys, first, end, dim, out); break;
        case 6: score_dots<6>(q, sums, keys, first, end, dim, out); break;
        case 7: score_dots<7>(q, sums, keys, first, end, dim, out); break;
        default: score_dots<kRows>(q, sums, keys, first, end, dim, out); break;
      }
    }
  }

  // dots[plane][row][channel] of a tile of rows with a tile of channels, over `blocks` blocks of keys.
  void weigh(const uint8_t* weights, const int8_t* values, int blocks, int dim, int32_t* dots) const {
    for (int r = 0; r < rows_; r += kRows) {
      const uint8_t* w = weights + r * kChunk;
      int32_t* out = dots + r * kTile;
      switch (rows_ - r) {
        case 1: weigh_dots<1>(w, values, blocks, dim, out); break;
        case 2: weigh_dots<2>(w, values, blocks, dim, out); break;
        case 3: weigh_dots<3>(w, values, blocks, dim, out); break;
        case 4: weigh_dots<4>(w, values, blocks, dim, out); break;
        case 5: weigh_dots<5>(w, values, blocks, dim, out); break;
        case 6: weigh_dots<6>(w, values, blocks, dim, out); break;
        case 7: weigh_dots<7>(w, values, blocks, dim, out); break;
        default: weigh_dots<kRows>(w, values, blocks, dim, out); break;
      }
    }
  }

 private:
  static constexpr int kRows = 8;  // Times planes, what registers hold.
  int rows_ = 0;
};
