// Eight floats in AVX2, FMA and F16C. Included inside a namespace and its target region.

constexpr int kWidth = 8;
constexpr int kKeyVectors = 2;  // Vectors of keys, or of channels, that a tile of kTileRows rows keeps in registers.
constexpr int kTileRows = 6;

typedef __m256 Vector;

static inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
static inline Vector splat(float x) { return _mm256_set1_ps(x); }
static inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
// Where either is NaN: b.
static inline Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
static inline Vector min(Vector a, Vector b) { return _mm256_min_ps(a, b); }
static inline Vector magnitude(Vector a) { return _mm256_andnot_ps(splat(-0.0f), a); }
static inline Vector copy_sign(Vector a, Vector sign) {
  return _mm256_or_ps(_mm256_andnot_ps(splat(-0.0f), a), _mm256_and_ps(splat(-0.0f), sign));
}
// x < limit ? yes : no; NaN takes no.
static inline Vector select_less(Vector x, Vector limit, Vector yes, Vector no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
}
static inline Vector round_even(Vector a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// p 2^n for n a whole number in [-126, 127].
static inline Vector scale_by_power(Vector p, Vector n) {
  const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23)));
}
static inline float sum(Vector v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float maximum(Vector v) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline Vector load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline Vector load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// The first eight, which here are all.
static inline Vector load_eight_int8(const int8_t* p) { return load_int8(p); }
static inline Vector load_eight_half(const uint16_t* p) { return load_half(p); }
static inline void store_eight(float* p, Vector v) { store(p, v); }
// Whole numbers in [-127, 127].
static inline void store_int8(int8_t* p, Vector v) {
  const __m256i wide = _mm256_cvtps_epi32(v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
static inline void store_half(uint16_t* p, Vector v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Channels [0, dim) of `count` <= kWidth rows: keys[d * kBlock + row] = element * scales[d / group * kBlock + row].
// Rows from `count` on become 0, as their scales are. Both work on 8 x 8 elements.
static inline void transpose_int8(const int8_t* rows, int count, int dim, const float* scales, int group, float* keys) {
  Vector scale = splat(0);
  for (int d0 = 0, left = 0; d0 < dim; d0 += 8, left -= 8) {
    if (left == 0) {  // The next group begins.
      scale = load(scales);
      scales += kBlock;
      left = group;
    }
    __m128i r[8];
    for (int i = 0; i < 8; i++) {
      r[i] = i < count ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows + static_cast<int64_t>(i) * dim + d0))
                       : _mm_setzero_si128();
    }
    const __m128i a = _mm_unpacklo_epi8(r[0], r[1]), b = _mm_unpacklo_epi8(r[2], r[3]);
    const __m128i c = _mm_unpacklo_epi8(r[4], r[5]), e = _mm_unpacklo_epi8(r[6], r[7]);
    const __m128i ab0 = _mm_unpacklo_epi16(a, b), ab1 = _mm_unpackhi_epi16(a, b);
    const __m128i ce0 = _mm_unpacklo_epi16(c, e), ce1 = _mm_unpackhi_epi16(c, e);
    // Two channels each, eight rows a channel.
    const __m128i pairs[4] = {_mm_unpacklo_epi32(ab0, ce0), _mm_unpackhi_epi32(ab0, ce0), _mm_unpacklo_epi32(ab1, ce1),
                              _mm_unpackhi_epi32(ab1, ce1)};
    for (int i = 0; i < 4; i++) {
      const Vector even = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(pairs[i]));
      const Vector odd = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(pairs[i], pairs[i])));
      store(keys + (d0 + 2 * i) * kBlock, even * scale);
      store(keys + (d0 + 2 * i + 1) * kBlock, odd * scale);
    }
  }
}
static inline void transpose_half(const uint16_t* rows, int count, int dim, float* keys) {
  for (int d0 = 0; d0 < dim; d0 += 8) {
    __m128i r[8], t[8];
    for (int i = 0; i < 8; i++) {
      r[i] = i < count ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + static_cast<int64_t>(i) * dim + d0))
                       : _mm_setzero_si128();
    }
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm_unpacklo_epi16(r[i], r[i + 1]);
      t[i + 1] = _mm_unpackhi_epi16(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm_unpacklo_epi32(t[i], t[i + 2]);
      r[i + 1] = _mm_unpackhi_epi32(t[i], t[i + 2]);
      r[i + 2] = _mm_unpacklo_epi32(t[i + 1], t[i + 3]);
      r[i + 3] = _mm_unpackhi_epi32(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
      store(keys + (d0 + 2 * i) * kBlock, _mm256_cvtph_ps(_mm_unpacklo_epi64(r[i], r[i + 4])));
      store(keys + (d0 + 2 * i + 1) * kBlock, _mm256_cvtph_ps(_mm_unpackhi_epi64(r[i], r[i + 4])));
    }
  }
}
