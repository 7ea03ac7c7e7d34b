// Sixteen floats in AVX-512 F, BW, DQ and VL. Included inside a namespace and its target region.

constexpr int kWidth = 16;
constexpr int kKeyVectors = 4;  // Vectors of keys, or of channels, that a tile of kTileRows rows keeps in registers.
constexpr int kTileRows = 6;

typedef __m512 Vector;

static inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
static inline Vector splat(float x) { return _mm512_set1_ps(x); }
static inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
// Where either is NaN: b.
static inline Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
static inline Vector min(Vector a, Vector b) { return _mm512_min_ps(a, b); }
static inline Vector magnitude(Vector a) { return _mm512_abs_ps(a); }
static inline Vector copy_sign(Vector a, Vector sign) {
  return _mm512_or_ps(_mm512_abs_ps(a), _mm512_and_ps(splat(-0.0f), sign));
}
// x < limit ? yes : no; NaN takes no.
static inline Vector select_less(Vector x, Vector limit, Vector yes, Vector no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), no, yes);
}
static inline Vector round_even(Vector a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// p 2^n.
static inline Vector scale_by_power(Vector p, Vector n) { return _mm512_scalef_ps(p, n); }
static inline float sum(Vector v) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float maximum(Vector v) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline Vector load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
static inline Vector load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// The first eight; the others are 0 and their memory is not read.
static inline Vector load_eight_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline Vector load_eight_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

static inline void store_eight(float* p, Vector v) { _mm256_storeu_ps(p, _mm512_castps512_ps256(v)); }

// Channels [0, dim) of `count` <= kWidth rows: keys[d * kBlock + row] = element * scales[d / group * kBlock + row].
// Rows from `count` on become 0, as their scales are. Sixteen rows of 64 bytes at a time: each 128-bit lane is a
// 16 x 16 transposition.
static inline void transpose_int8(const int8_t* rows, int count, int dim, const float* scales, int group, float* keys) {
  Vector scale = splat(0);
  for (int d0 = 0, left = 0; d0 < dim; d0 += 64) {
    const int width = dim - d0 < 64 ? dim - d0 : 64;
    const __mmask64 mask = width == 64 ? ~__mmask64{0} : (__mmask64{1} << width) - 1;
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) {
      r[i] = i < count ? _mm512_maskz_loadu_epi8(mask, rows + static_cast<int64_t>(i) * dim + d0)
                       : _mm512_setzero_si512();
    }
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi8(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi8(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      for (int j = 0; j < 2; j++) {
        r[i + 2 * j] = _mm512_unpacklo_epi16(t[i + j], t[i + 2 + j]);
        r[i + 2 * j + 1] = _mm512_unpackhi_epi16(t[i + j], t[i + 2 + j]);
      }
    }
    for (int i = 0; i < 16; i += 8) {
      for (int j = 0; j < 4; j++) {
        t[i + 2 * j] = _mm512_unpacklo_epi32(r[i + j], r[i + 4 + j]);
        t[i + 2 * j + 1] = _mm512_unpackhi_epi32(r[i + j], r[i + 4 + j]);
      }
    }
    alignas(64) int8_t columns[16][64];  // [j][16 lane + row]: channel d0 + 16 lane + j.
    for (int j = 0; j < 8; j++) {
      _mm512_store_si512(columns[2 * j], _mm512_unpacklo_epi64(t[j], t[8 + j]));
      _mm512_store_si512(columns[2 * j + 1], _mm512_unpackhi_epi64(t[j], t[8 + j]));
    }
    for (int d = 0; d < width; d += 8, left -= 8) {
      if (left == 0) {  // The next group begins.
        scale = load(scales);
        scales += kBlock;
        left = group;
      }
      const int8_t* column = columns[d % 16] + d / 16 * 16;
      float* out = keys + (d0 + d) * kBlock;
      for (int j = 0; j < 8; j++) store(out + j * kBlock, load_int8(column + j * 64) * scale);
    }
  }
}
// Twice eight rows of 32 channels at a time: each 128-bit lane is an 8 x 8 transposition.
static inline void transpose_half(const uint16_t* rows, int count, int dim, float* keys) {
  for (int d0 = 0; d0 < dim; d0 += 32) {
    const int width = dim - d0 < 32 ? dim - d0 : 32;
    const __mmask32 mask = width == 32 ? ~__mmask32{0} : (__mmask32{1} << width) - 1;
    alignas(64) uint16_t columns[2][8][32];  // [rows' half][j][8 lane + row]: channel d0 + 8 lane + j.
    for (int half = 0; half < 2; half++) {
      __m512i r[8], t[8];
      for (int i = 0; i < 8; i++) {
        const int row = 8 * half + i;
        r[i] = row < count ? _mm512_maskz_loadu_epi16(mask, rows + static_cast<int64_t>(row) * dim + d0)
                           : _mm512_setzero_si512();
      }
      for (int i = 0; i < 8; i += 2) {
        t[i] = _mm512_unpacklo_epi16(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 1]);
      }
      for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; j++) {
          r[i + 2 * j] = _mm512_unpacklo_epi32(t[i + j], t[i + 2 + j]);
          r[i + 2 * j + 1] = _mm512_unpackhi_epi32(t[i + j], t[i + 2 + j]);
        }
      }
      for (int j = 0; j < 4; j++) {
        _mm512_store_si512(columns[half][2 * j], _mm512_unpacklo_epi64(r[j], r[4 + j]));
        _mm512_store_si512(columns[half][2 * j + 1], _mm512_unpackhi_epi64(r[j], r[4 + j]));
      }
    }
    for (int d = 0; d < width; d++) {
      const __m128i low = _mm_load_si128(reinterpret_cast<const __m128i*>(columns[0][d % 8] + d / 8 * 8));
      const __m128i high = _mm_load_si128(reinterpret_cast<const __m128i*>(columns[1][d % 8] + d / 8 * 8));
      store(keys + (d0 + d) * kBlock, _mm512_cvtph_ps(_mm256_set_m128i(high, low)));
    }
  }
}
