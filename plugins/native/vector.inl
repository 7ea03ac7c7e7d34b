// Vectors of one instruction set: F (kWidth floats), I (kWidth int32), and what kernels do with them.
// Included by for_each_isa.h only. Operators are those of GCC's vector types; apart from fma() everything rounds after
// every operation, so that all instruction sets give the same bits.

#if defined(SPECEXPORT_AVX512)
constexpr int kWidth = 16;
#elif defined(SPECEXPORT_AVX2)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float F __attribute__((vector_size(kWidth * 4)));
typedef int32_t I __attribute__((vector_size(kWidth * 4)));

#define SPECEXPORT_INLINE [[maybe_unused]] static inline __attribute__((always_inline))

SPECEXPORT_INLINE F load(const float* p) {
  F v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
SPECEXPORT_INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }

// kWidth copies of one number. Not `F{} + x`, which turns -0 into 0.
SPECEXPORT_INLINE F splat(float x) {
#if defined(SPECEXPORT_AVX512)
  return (F)_mm512_set1_ps(x);
#elif defined(SPECEXPORT_AVX2)
  return (F)_mm256_set1_ps(x);
#else
  return F{x, x, x, x};
#endif
}
SPECEXPORT_INLINE I splat(int32_t x) { return I{} + x; }

// a * b + c: rounded once where the machine can, twice in the portable version.
SPECEXPORT_INLINE F fma(F a, F b, F c) {
#if defined(SPECEXPORT_AVX512)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(SPECEXPORT_AVX2)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

SPECEXPORT_INLINE F to_float(I v) { return __builtin_convertvector(v, F); }

// kWidth float16 numbers.
SPECEXPORT_INLINE F load_half(const uint8_t* p) {
#if defined(SPECEXPORT_AVX512)
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(SPECEXPORT_AVX2)
  return (F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  F v;
  for (int i = 0; i < kWidth; i++) {
    uint16_t half;
    std::memcpy(&half, p + 2 * i, sizeof half);
    v[i] = half_to_float(half);
  }
  return v;
#endif
}

SPECEXPORT_INLINE F smaller(F a, F b) { return a < b ? a : b; }  // b where either is NaN
SPECEXPORT_INLINE F larger(F a, F b) { return a > b ? a : b; }   // b where either is NaN
SPECEXPORT_INLINE I larger(I a, I b) { return a > b ? a : b; }
SPECEXPORT_INLINE I magnitude_bits(F v) { return (I)v & splat(0x7fffffff); }

// Nearest integer, ties to even, for |v| < 2^22.
SPECEXPORT_INLINE F round_even(F v) {
  const F shift = splat(12582912.0f);
  return (v + shift) - shift;
}

// The largest lane, and the sum of all (which must not overflow).
SPECEXPORT_INLINE int32_t largest(I v) {
#if defined(SPECEXPORT_AVX512)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t most = v[0];
  for (int i = 1; i < kWidth; i++) most = v[i] > most ? v[i] : most;
  return most;
#endif
}
SPECEXPORT_INLINE int32_t total(I v) {
#if defined(SPECEXPORT_AVX512)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int i = 0; i < kWidth; i++) sum += v[i];
  return sum;
#endif
}

// Sixteen lanes to one number, in one order for every width.
SPECEXPORT_INLINE float sum16(const float* lanes) {
  float s[8];
  for (int i = 0; i < 8; i++) s[i] = lanes[i] + lanes[i + 8];
  for (int i = 0; i < 4; i++) s[i] += s[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}

// e^v within 2e-7 relative; NaN stays NaN, the ends saturate at e^-87 and e^88.
SPECEXPORT_INLINE F exponential(F v) {
  v = v < splat(-87.0f) ? splat(-87.0f) : v;
  v = v > splat(88.0f) ? splat(88.0f) : v;
  const F n = round_even(v * splat(1.44269504088896341f));
  // ln 2 in two parts; the first has few enough bits that n times it is exact.
  const F r = (v - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  F p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = (p * (r * r) + r) + splat(1.0f);
  const I power = (__builtin_convertvector(n, I) + 127) << 23;
  return p * (F)power;
}

// 1 - erf(v) for v >= 0 within 1e-6 relative up to v = 5 (Chebyshev fit, Numerical Recipes 6.2).
SPECEXPORT_INLINE F erfc_positive(F v) {
  const F t = splat(1.0f) / (splat(1.0f) + v * splat(0.5f));
  F p = splat(0.17087277f);
  p = p * t + splat(-0.82215223f);
  p = p * t + splat(1.48851587f);
  p = p * t + splat(-1.13520398f);
  p = p * t + splat(0.27886807f);
  p = p * t + splat(-0.18628806f);
  p = p * t + splat(0.09678418f);
  p = p * t + splat(0.37409196f);
  p = p * t + splat(1.00002368f);
  p = p * t + splat(-1.26551223f);
  return t * exponential(p - v * v);
}
