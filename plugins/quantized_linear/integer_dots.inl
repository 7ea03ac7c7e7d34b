// Dot products of quantized activations with a tile of 4- or 8-bit weights.
//
// An activation is kPlanes int8 numbers: one, or two that mean 128 * first + second. Each plane has a sum of its
// own, and the two are joined as integers: 32 products of at most 255 and 16256 stay under 2^27.
// For each group of 32 inputs the integer sum is exact; it then enters the row's float32 sum, group after group, with
// the same operations whatever the number of rows.

// The sum of a row from those of its planes, which lie one after the other.
template <int kPlanes, class Sum>
SPECEXPORT_INLINE I joined(const Sum* sums, int row) {
  if (kPlanes == 1) return (I)sums[row];
  return ((I)sums[2 * row] << 7) + (I)sums[2 * row + 1];
}

// dots[r] = start[r] + sum over 32 inputs of weight * q[r], for kWidth outputs from lane `lane` of the tile on.
// `weights` are the 32 inputs' lines; `q` holds the R rows' integers, [R][kPlanes][32].
#if defined(SPECEXPORT_AVX512)

typedef int32_t AliasedInt __attribute__((may_alias, aligned(1)));
constexpr int kAhead = 6144;  // bytes that loads run ahead of the arithmetic: 1 kB is too few, over 2.5 kB no matter

template <int R, int kBits, int kPlanes>
SPECEXPORT_INLINE void dot_group(const uint8_t* weights, int, const int8_t* q, const float* starts, int, I* dots) {
  constexpr int kLines = kBits == 4 ? 4 : 8, kSums = R * kPlanes;
  __m512i sums[kSums];
  for (int s = 0; s < kSums; s++) {
    const bool last = (s + 1) % kPlanes == 0;
    sums[s] = _mm512_set1_epi32(last ? reinterpret_cast<const AliasedInt*>(starts)[s / kPlanes] : 0);
  }
#pragma GCC unroll 8
  for (int j = 0; j < kLines; j++) {
    const __m512i line = _mm512_loadu_si512(weights + 64 * j);
    _mm_prefetch(reinterpret_cast<const char*>(weights) + 64 * j + kAhead, _MM_HINT_T0);
    if (kBits == 4) {
      const __m512i mask = _mm512_set1_epi8(15);
      const __m512i low = _mm512_and_si512(line, mask), high = _mm512_and_si512(_mm512_srli_epi16(line, 4), mask);
#pragma GCC unroll 16
      for (int s = 0; s < kSums; s++) {
        const AliasedInt* a = reinterpret_cast<const AliasedInt*>(q + s * kGroup) + 2 * j;
        sums[s] = _mm512_dpbusd_epi32(sums[s], low, _mm512_set1_epi32(a[0]));
        sums[s] = _mm512_dpbusd_epi32(sums[s], high, _mm512_set1_epi32(a[1]));
      }
    } else {
#pragma GCC unroll 16
      for (int s = 0; s < kSums; s++) {
        const AliasedInt* a = reinterpret_cast<const AliasedInt*>(q + s * kGroup) + j;
        sums[s] = _mm512_dpbusd_epi32(sums[s], line, _mm512_set1_epi32(a[0]));
      }
    }
  }
  for (int r = 0; r < R; r++) dots[r] = joined<kPlanes>(sums, r);
}

#elif defined(SPECEXPORT_AVX2)

typedef int32_t AliasedInt __attribute__((may_alias, aligned(1)));

template <int R, int kBits, int kPlanes>
SPECEXPORT_INLINE void dot_group(const uint8_t* weights, int lane, const int8_t* q, const float* starts, int, I* dots) {
  constexpr int kLines = kBits == 4 ? 4 : 8, kSums = R * kPlanes;
  __m256i sums[kSums];
  for (int s = 0; s < kSums; s++) sums[s] = _mm256_setzero_si256();
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int j = 0; j < kLines; j++) {
    const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 64 * j + lane * 4));
    if (kBits == 4) {
      // |sum of two products| <= 15 * 127 * 2 = 3810: eight of them stay in 16 bits.
      const __m256i mask = _mm256_set1_epi8(15);
      const __m256i low = _mm256_and_si256(line, mask), high = _mm256_and_si256(_mm256_srli_epi16(line, 4), mask);
#pragma GCC unroll 8
      for (int s = 0; s < kSums; s++) {
        const AliasedInt* a = reinterpret_cast<const AliasedInt*>(q + s * kGroup) + 2 * j;
        const __m256i first = _mm256_maddubs_epi16(low, _mm256_set1_epi32(a[0]));
        const __m256i second = _mm256_maddubs_epi16(high, _mm256_set1_epi32(a[1]));
        sums[s] = _mm256_add_epi16(sums[s], _mm256_add_epi16(first, second));
      }
    } else {
      // Signed weights as magnitude times the activation with the weight's sign: |w| <= 128, |a| <= 127, and two
      // products, 32512, stay in 16 bits, where unsigned weights would saturate.
      const __m256i w = _mm256_xor_si256(line, _mm256_set1_epi8(-128)), magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 8
      for (int s = 0; s < kSums; s++) {
        const AliasedInt* a = reinterpret_cast<const AliasedInt*>(q + s * kGroup) + j;
        const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(_mm256_set1_epi32(a[0]), w));
        sums[s] = _mm256_add_epi32(sums[s], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
  if (kBits == 4) {
    for (int s = 0; s < kSums; s++) sums[s] = _mm256_madd_epi16(sums[s], ones);
  }
  for (int r = 0; r < R; r++) {
    dots[r] = joined<kPlanes>(sums, r);
    if (kBits == 4) dots[r] = dots[r] + splat(reinterpret_cast<const AliasedInt*>(starts)[r]);
  }
}

#else

template <int R, int kBits, int kPlanes>
SPECEXPORT_INLINE void dot_group(const uint8_t* weights, int lane, const int8_t* q, const float* starts, int, I* dots) {
  for (int r = 0; r < R; r++) {
    int32_t start;
    std::memcpy(&start, starts + r, sizeof start);
    for (int o = 0; o < kWidth; o++) {
      int32_t sum = 0;
      for (int plane = 0; plane < kPlanes; plane++) {
        const int8_t* a = q + (r * kPlanes + plane) * kGroup;
        sum = sum * 128;
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
      }
      dots[r][o] = start + sum;
    }
  }
}

#endif

// R rows of a block, times one tile, to out [R][16]. `stride` is the block's number of rows.
template <int R, int kBits, bool kMinimum, int kPlanes>
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
          dot_group<R, kBits, kPlanes>(weights, lane, q, scales + 2 * stride, stride, dots);
          for (int r = 0; r < R; r++) {
            sums[r] = fma(to_float(dots[r]), scale * splat(scales[r]), sums[r]);
            if (kMinimum) sums[r] = fma(minimum, splat(scales[stride + r]), sums[r]);
          }
          weights += kGroupBytes;
          q += stride * kGroup * kPlanes;
          scales += stride * 3;
        }
      }
    }
    for (int r = 0; r < R; r++) store(out + r * kTile + lane, sums[r]);
  }
}

// All rows of a block, as many at a time as the registers hold.
template <int kBits, bool kMinimum, int kPlanes>
void integer_block(const LinearConfig& config, const uint8_t* tile, const int8_t* integers, const float* scales,
                   int rows, float* out) {
#if defined(SPECEXPORT_AVX512)
  switch (rows) {
    case 1: return integer_tile<1, kBits, kMinimum, kPlanes>(config, tile, integers, scales, 1, out);
    case 2: return integer_tile<2, kBits, kMinimum, kPlanes>(config, tile, integers, scales, 2, out);
    case 3: return integer_tile<3, kBits, kMinimum, kPlanes>(config, tile, integers, scales, 3, out);
    case 4: return integer_tile<4, kBits, kMinimum, kPlanes>(config, tile, integers, scales, 4, out);
    case 5: return integer_tile<5, kBits, kMinimum, kPlanes>(config, tile, integers, scales, 5, out);
    case 6: return integer_tile<6, kBits, kMinimum, kPlanes>(config, tile, integers, scales, 6, out);
    case 7: return integer_tile<7, kBits, kMinimum, kPlanes>(config, tile, integers, scales, 7, out);
    default: return integer_tile<8, kBits, kMinimum, kPlanes>(config, tile, integers, scales, 8, out);
  }
#else
  const auto some = [&](auto tile_of, int r) {
    tile_of(config, tile, integers + r * kGroup * kPlanes, scales + r, rows, out + r * kTile);
  };
  int r = 0;
  if (kPlanes == 1) {  // two planes of four rows would not fit the registers
    for (; r + 4 <= rows; r += 4) some(integer_tile<4, kBits, kMinimum, kPlanes>, r);
  }
  for (; r + 2 <= rows; r += 2) some(integer_tile<2, kBits, kMinimum, kPlanes>, r);
  for (; r < rows; r++) some(integer_tile<1, kBits, kMinimum, kPlanes>, r);
#endif
}

// The same for the matrix's own format.
template <int kPlanes>
SPECEXPORT_INLINE void integer_sums(const LinearConfig& config, const uint8_t* tile, const int8_t* integers,
                                    const float* scales, int rows, float* out) {
  if (config.bits == 4) {
    if (config.has_minimum) return integer_block<4, true, kPlanes>(config, tile, integers, scales, rows, out);
    return integer_block<4, false, kPlanes>(config, tile, integers, scales, rows, out);
  }
  if (config.has_minimum) return integer_block<8, true, kPlanes>(config, tile, integers, scales, rows, out);
  return integer_block<8, false, kPlanes>(config, tile, integers, scales, rows, out);
}
