// Numbers as integers of three bytes under one factor, one byte a plane, for exact sums of products with int8.
// Both factors are as fine as float32 itself: 2^-23 of the largest number. Included after spans.inl.

constexpr float kLargestQuery = 127 * 65536.0f;         // Its first byte still has a sign.
constexpr float kLargestWeight = 65536 * 256.0f - 256;  // Rounding up cannot reach 2^24.
constexpr float kNegligible = 1e-30f;                   // Largest numbers below count as 0: their factor's inverse is none.

// The factor of numbers whose largest has these bits (as unsigned numbers: infinity and NaN are larger than all, and so
// is what has a sign). Without a finite largest the factor is NaN and so is what it multiplies.
static inline float plane_step(uint32_t largest_bits, float top, float* inverse) {
  const float largest = bits_to_float(largest_bits);
  *inverse = 0;
  if (largest_bits >= 0x7f800000) return __builtin_nanf("");
  if (largest < kNegligible) return 0;
  *inverse = top / largest;
  return largest / top;
}

// A query row to planes[plane][d], kTile * dim bytes a plane; `sums` gets 128 times the sum of each group and plane, one
// at [group][plane], kTile numbers apart. Digits run from -128 to 127, but the first's from -127.
static float query_to_planes(const float* q, int dim, int group_size, int8_t* planes, int32_t* sums) {
  __m512i largest = _mm512_setzero_si512();
  for (int d = 0; d < dim; d += kWidth)
    largest = _mm512_max_epu32(largest, _mm512_castps_si512(magnitude(load(q + d))));
  float inverse;
  const float step = plane_step(_mm512_reduce_max_epu32(largest), kLargestQuery, &inverse);
  for (int first = 0; first < dim; first += group_size) {
    __m512i total[kPlanes] = {};
    for (int d = first; d < first + group_size; d += kWidth) {
      __m512i rest = _mm512_cvtps_epi32(load(q + d) * splat(inverse));
      for (int p = kPlanes - 1; p >= 0; p--) {
        const __m512i digit = p == 0 ? rest : _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
        rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, digit), 8);
        total[p] = _mm512_add_epi32(total[p], digit);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(planes + p * kTile * dim + d), _mm512_cvtepi32_epi8(digit));
      }
    }
    for (int p = 0; p < kPlanes; p++, sums += kTile) *sums = 128 * _mm512_reduce_add_epi32(total[p]);
  }
  return step;
}

// Lanes i + l of a vector that lie in [first, end).
static inline __mmask16 lanes_within(int first, int end, int i) {
  const int low = first - i < 0 ? 0 : first - i, high = end - i > 16 ? 16 : end - i;
  return high <= low ? 0 : static_cast<__mmask16>(((1u << high) - 1) & ~((1u << low) - 1));
}

// Weights times scales of the attended positions of a chunk, and 0 for others of the blocks [from, to), to
// planes[plane][position in packed order], kTile * kChunk bytes a plane. Returns their factor.
static float weights_to_planes(const float* weights, const float* scales, Span attended, int from, int to,
                               uint8_t* planes) {
  alignas(64) float products[kChunk];
  __m512i largest = _mm512_setzero_si512();
  for (int i = from; i < to; i += kWidth) {
    // Where a position is not attended its scale may be anything.
    const Vector product = _mm512_maskz_mul_ps(lanes_within(attended.first, attended.end, i), load(weights + i), load(scales + i));
    store(products + i, product);
    largest = _mm512_max_epu32(largest, _mm512_castps_si512(product));
  }
  float inverse;
  const float step = plane_step(_mm512_reduce_max_epu32(largest), kLargestWeight, &inverse);
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15));
  for (int i = from; i < to; i += kBlock) {
    __m512i v[4];  // Word p of a lane: plane p of the lane's four positions.
    for (int j = 0; j < 4; j++) {
      v[j] = _mm512_cvtps_epi32(load(products + i + j * kWidth) * splat(inverse));
      v[j] = _mm512_shuffle_epi8(v[j], bytes);
    }
    const __m512i low01 = _mm512_unpacklo_epi32(v[0], v[1]), low23 = _mm512_unpacklo_epi32(v[2], v[3]);
    const __m512i high01 = _mm512_unpackhi_epi32(v[0], v[1]), high23 = _mm512_unpackhi_epi32(v[2], v[3]);
    _mm512_storeu_si512(planes + i, _mm512_unpacklo_epi64(low01, low23));
    _mm512_storeu_si512(planes + kTile * kChunk + i, _mm512_unpackhi_epi64(low01, low23));
    _mm512_storeu_si512(planes + 2 * kTile * kChunk + i, _mm512_unpacklo_epi64(high01, high23));
  }
  return step;
}

// kWidth sums of products from those of the planes, at dots, dots + kTile kTile, ...; each is exact in float.
static inline Vector planes_to_float(const int32_t* dots) {
  const auto plane = [&](int p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(dots + p * kTile * kTile)); };
  return fma(plane(0), splat(65536), fma(plane(1), splat(256), plane(2)));
}
