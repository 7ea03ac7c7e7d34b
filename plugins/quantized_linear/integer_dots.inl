// Dot products of int8 activations with a tile of 4- or 8-bit weights.
//
// For each group of 32 inputs the integer sum is exact; it then enters the row's float32 sum, group after group, with
// the same operations whatever the number of rows.

// dots[r] = start[r] + sum over 32 inputs of weight * q[r], for kWidth outputs from lane `lane` of the tile on.
// `weights` are the 32 inputs' lines; `q` holds the R rows' integers `stride` apart by 32 bytes.
#if defined(SPECEXPORT_AVX512)

typedef int32_t AliasedInt __attribute__((may_alias, aligned(1)));
constexpr int kAhead = 6144;  // bytes that loads run ahead of the arithmetic: 1 kB is too few, over 2.5 kB no matter

template <int R, int kBits>
SPECEXPORT_INLINE void dot_group(const uint8_t* weights, int, const int8_t* q, const float* starts, int, I* dots) {
  constexpr int kLines = kBits == 4 ? 4 : 8;
  __m512i sums[R];
  for (int r = 0; r < R; r++) sums[r] = _mm512_set1_epi32(reinterpret_cast<const AliasedInt*>(starts)[r]);
#pragma GCC unroll 8
  for (int j = 0; j < kLines; j++) {
    const __m512i line = _mm512_loadu_si512(weights + 64 * j);
    _mm_prefetch(reinterpret_cast<const char*>(weights) + 64 * j + kAhead, _MM_HINT_T0);
    if (kBits == 4) {
      const __m512i mask = _mm512_set1_epi8(15);
      const __m512i low = _mm512_and_si512(line, mask), high = _mm512_and_si512(_mm512_srli_epi16(line, 4), mask);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const AliasedInt* a = reinterpret_cast<const AliasedInt*>(q + r * kGroup) + 2 * j;
        sums[r] = _mm512_dpbusd_epi32(sums[r], low, _mm512_set1_epi32(a[0]));
        sums[r] = _mm512_dpbusd_epi32(sums[r], high, _mm512_set1_epi32(a[1]));
      }
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const AliasedInt* a = reinterpret_cast<const AliasedInt*>(q + r * kGroup) + j;
        sums[r] = _mm512_dpbusd_epi32(sums[r], line, _mm512_set1_epi32(a[0]));
      }
    }
  }
  for (int r = 0; r < R; r++) dots[r] = (I)sums[r];
}

#elif defined(SPECEXPORT_AVX2)

typedef int32_t AliasedInt __attribute__((may_alias, aligned(1)));

template <int R, int kBits>
SPECEXPORT_INLINE void dot_group(const uint8_t* weights, int lane, const int8_t* q, const float* starts, int, I* dots) {
  constexpr int kLines = kBits == 4 ? 4 : 8;
  __m256i sums[R];
  for (int r = 0; r < R; r++) sums[r] = _mm256_setzero_si256();
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int j = 0; j < kLines; j++) {
    const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 64 * j + lane * 4));
    if (kBits == 4) {
      // |sum of two products| <= 15 * 127 * 2 = 3810: eight of them stay in 16 bits.
      const __m256i mask = _mm256_set1_epi8(15);
      const __m256i low = _mm256_and_si256(line, mask), high = _mm256_and_si256(_mm256_srli_epi16(line, 4), mask);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const AliasedInt* a = reinterpret_cast<const AliasedInt*>(q + r * kGroup) + 2 * j;
        const __m256i first = _mm256_maddubs_epi16(low, _mm256_set1_epi32(a[0]));
        const __m256i second = _mm256_maddubs_epi16(high, _mm256_set1_epi32(a[1]));
        sums[r] = _mm256_add_epi16(sums[r], _mm256_add_epi16(first, second));
      }
    } else {
      // Signed weights as magnitude times the activation with the weight's sign: |w| <= 128, |a| <= 127, and two
      // products, 32512, stay in 16 bits, where unsigned weights would saturate.
      const __m256i w = _mm256_xor_si256(line, _mm256_set1_epi8(-128)), magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const AliasedInt* a = reinterpret_cast<const AliasedInt*>(q + r * kGroup) + j;
        const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(_mm256_set1_epi32(a[0]), w));
        sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
  for (int r = 0; r < R; r++) {
    if (kBits == 4) {
      const __m256i start = _mm256_set1_epi32(reinterpret_cast<const AliasedInt*>(starts)[r]);
      sums[r] = _mm256_add_epi32(_mm256_madd_epi16(sums[r], ones), start);
    }
    dots[r] = (I)sums[r];
  }
}

#else

template <int R, int kBits>
SPECEXPORT_INLINE void dot_group(const uint8_t* weights, int lane, const int8_t* q, const float* starts, int, I* dots) {
  for (int r = 0; r < R; r++) {
    int32_t start;
    std::memcpy(&start, starts + r, sizeof start);
    const int8_t* a = q + r * kGroup;
    for (int o = 0; o < kWidth; o++) {
      int32_t sum = start;
      for (int j = 0; j < (kBits == 4 ? 4 : 8); j++) {
        const uint8_t* w = weights + 64 * j + (lane + o) * 4;
        for (int i = 0; i < 4; i++) {
          if (kBits == 4) {
            sum += (w[i] & 15) * a[8 * j + i] + (w[i] >> 4) * a[8 * j + 4 + i];
          } else {
            sum += w[i] * a[4 * j + i];
          }
        }
      }
      dots[r][o] = sum;
    }
  }
}

#endif

// R rows of a block, times one tile, to out [R][16]. `stride` is the block's number of rows.
template <int R, int kBits, bool kMinimum>
void integer_tile(const LinearConfig& config, const uint8_t* tile, const int8_t* integers, const float* block_scales,
                  int stride, float* out) {
  constexpr int kGroupsPerLine = kMinimum ? 1 : 2;
  constexpr int kGroupBytes = kGroup * kTile * kBits / 8;
  const int64_t groups = config.groups();
  const int parts = config.group_size >> 5;
  static_assert(kGroup == 32, "parts of a scale group");
  for (int lane = 0; lane < kTile; lane += kWidth) {
    F sums[R] = {};
    const uint8_t* weights = tile;
    const int8_t* q = integers;
    const float* scales = block_scales;
    for (int64_t group = 0; group < groups;) {
      const uint8_t* line = weights;
#if defined(SPECEXPORT_AVX512)
      _mm_prefetch(reinterpret_cast<const char*>(line) + kAhead, _MM_HINT_T0);
#endif
      weights += 64;
      for (int g = 0; g < kGroupsPerLine && group < groups; g++, group++) {
        const F scale = load_half(line + 32 * g + 2 * lane);
        const F minimum = kMinimum ? load_half(line + 32 + 2 * lane) : F{};
        for (int part = 0; part < parts; part++) {
          I dots[R];
          dot_group<R, kBits>(weights, lane, q, scales + 2 * stride, stride, dots);
          for (int r = 0; r < R; r++) {
            sums[r] = fma(to_float(dots[r]), scale * splat(scales[r]), sums[r]);
            if (kMinimum) sums[r] = fma(minimum, splat(scales[stride + r]), sums[r]);
          }
          weights += kGroupBytes;
          q += stride * kGroup;
          scales += stride * 3;
        }
      }
    }
    for (int r = 0; r < R; r++) store(out + r * kTile + lane, sums[r]);
  }
}

// All rows of a block, as many at a time as the registers hold.
template <int kBits, bool kMinimum>
void integer_block(const LinearConfig& config, const uint8_t* tile, const int8_t* integers, const float* scales,
                   int rows, float* out) {
#if defined(SPECEXPORT_AVX512)
  switch (rows) {
    case 1: return integer_tile<1, kBits, kMinimum>(config, tile, integers, scales, 1, out);
    case 2: return integer_tile<2, kBits, kMinimum>(config, tile, integers, scales, 2, out);
    case 3: return integer_tile<3, kBits, kMinimum>(config, tile, integers, scales, 3, out);
    case 4: return integer_tile<4, kBits, kMinimum>(config, tile, integers, scales, 4, out);
    case 5: return integer_tile<5, kBits, kMinimum>(config, tile, integers, scales, 5, out);
    case 6: return integer_tile<6, kBits, kMinimum>(config, tile, integers, scales, 6, out);
    case 7: return integer_tile<7, kBits, kMinimum>(config, tile, integers, scales, 7, out);
    default: return integer_tile<8, kBits, kMinimum>(config, tile, integers, scales, 8, out);
  }
#else
  int r = 0;
  for (; r + 4 <= rows; r += 4)
    integer_tile<4, kBits, kMinimum>(config, tile, integers + r * kGroup, scales + r, rows, out + r * kTile);
  for (; r + 2 <= rows; r += 2)
    integer_tile<2, kBits, kMinimum>(config, tile, integers + r * kGroup, scales + r, rows, out + r * kTile);
  for (; r < rows; r++)
    integer_tile<1, kBits, kMinimum>(config, tile, integers + r * kGroup, scales + r, rows, out + r * kTile);
#endif
}
