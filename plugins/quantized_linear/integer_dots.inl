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

// dots[t][r] = start[r] + sum over 32 inputs of weight * q[r], for kWidth outputs of each of T tiles, from `lane` on.
// `weights` are the 32 inputs' lines in the first tile, the next tile's are tile_bytes further; `q` holds the R rows'
// integers, [R][kPlanes][32]. kStarts says whether there are starts at all. `ahead` is where the first tile's lines lie
// that later groups will want.
#if defined(SPECEXPORT_AVX512)

typedef int32_t AliasedInt __attribute__((may_alias, aligned(1)));
constexpr int kAhead = 6400;  // bytes that loads run ahead of the arithmetic: 1 kB is too few, over 2.5 kB no matter

template <int T, int R, int kBits, bool kStarts, int kPlanes>
SPECEXPORT_INLINE void dot_group(const uint8_t* weights, int64_t tile_bytes, int, const int8_t* q, const float* starts,
                                 const uint8_t* ahead, I (*dots)[R]) {
  constexpr int kLines = kBits == 4 ? 4 : 8, kSums = R * kPlanes;
  const __m512i mask = _mm512_set1_epi8(15);
  __m512i sums[T][kSums];
  for (int s = 0; s < kSums; s++) {
    const bool started = kStarts && (s + 1) % kPlanes == 0;
    const int32_t start = started ? reinterpret_cast<const AliasedInt*>(starts)[s / kPlanes] : 0;
    for (int t = 0; t < T; t++) sums[t][s] = _mm512_set1_epi32(start);
  }
#pragma GCC unroll 8
  for (int j = 0; j < kLines; j++) {
    __m512i line[T], low[T], high[T];
    for (int t = 0; t < T; t++) {
      line[t] = _mm512_loadu_si512(weights + t * tile_bytes + 64 * j);
      _mm_prefetch(reinterpret_cast<const char*>(ahead) + t * tile_bytes + 64 * j, _MM_HINT_T0);
      low[t] = _mm512_and_si512(line[t], mask);
      high[t] = _mm512_and_si512(_mm512_srli_epi16(line[t], 4), mask);
    }
#pragma GCC unroll 16
    for (int s = 0; s < kSums; s++) {
      const AliasedInt* a = reinterpret_cast<const AliasedInt*>(q + s * kGroup);
      if (kBits == 4) {
        for (int t = 0; t < T; t++) sums[t][s] = _mm512_dpbusd_epi32(sums[t][s], low[t], _mm512_set1_epi32(a[2 * j]));
        for (int t = 0; t < T; t++)
          sums[t][s] = _mm512_dpbusd_epi32(sums[t][s], high[t], _mm512_set1_epi32(a[2 * j + 1]));
      } else {
        for (int t = 0; t < T; t++) sums[t][s] = _mm512_dpbusd_epi32(sums[t][s], line[t], _mm512_set1_epi32(a[j]));
      }
    }
  }
  for (int t = 0; t < T; t++)
    for (int r = 0; r < R; r++) dots[t][r] = joined<kPlanes>(sums[t], r);
}

#elif defined(SPECEXPORT_AVX2)

typedef int32_t AliasedInt __attribute__((may_alias, aligned(1)));

template <int T, int R, int kBits, bool kStarts, int kPlanes>
SPECEXPORT_INLINE void dot_group(const uint8_t* weights, int64_t, int lane, const int8_t* q, const float* starts,
                                 const uint8_t*, I (*all_dots)[R]) {
  static_assert(T == 1, "more tiles would not fit the registers");
  I* dots = all_dots[0];
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
    if (kBits == 4 && kStarts) dots[r] = dots[r] + splat(reinterpret_cast<const AliasedInt*>(starts)[r]);
  }
}

#else

template <int T, int R, int kBits, bool kStarts, int kPlanes>
SPECEXPORT_INLINE void dot_group(const uint8_t* weights, int64_t, int lane, const int8_t* q, const float* starts,
                                 const uint8_t*, I (*all_dots)[R]) {
  static_assert(T == 1, "more tiles would not fit the registers");
  I* dots = all_dots[0];
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

// R rows of a block times T tiles, to `out`, [T][kRowBlock][16]. `stride` is the block's number of rows.
template <int T, int R, int kBits, bool kMinimum, int kPlanes>
void integer_tiles(const LinearConfig& config, const uint8_t* tile, const int8_t* integers, const float* block_scales,
                   int stride, float* out) {
  constexpr int kGroupsPerLine = kMinimum ? 1 : 2;
  constexpr int kGroupBytes = kGroup * kTile * kBits / 8;
  constexpr bool kStarts = kBits == 8 || !kMinimum;
  const int64_t groups = config.groups(), tile_bytes = config.tile_bytes();
  const int parts = config.group_size >> 5;
  static_assert(kGroup == 32, "parts of a scale group");
#if defined(SPECEXPORT_AVX512)
  // Lines are wanted from all T tiles in turn, so what comes after the first tile's end is the next T tiles' first.
  const auto later = [&](const uint8_t* at) {
    at += kAhead / T;
    return at < tile + tile_bytes ? at : at + (T - 1) * tile_bytes;
  };
#else
  const auto later = [](const uint8_t* at) { return at; };
#endif
  for (int lane = 0; lane < kTile; lane += kWidth) {
    F sums[T][R] = {};
    const uint8_t* weights = tile;
    const int8_t* q = integers;
    const float* scales = block_scales;
    for (int64_t group = 0; group < groups;) {
      const uint8_t* line = weights;
#if defined(SPECEXPORT_AVX512)
      for (int t = 0; t < T; t++)
        _mm_prefetch(reinterpret_cast<const char*>(later(line)) + t * tile_bytes, _MM_HINT_T0);
#endif
      weights += 64;
      for (int g = 0; g < kGroupsPerLine && group < groups; g++, group++) {
        F scale[T], minimum[T];
        for (int t = 0; t < T; t++) {
          scale[t] = load_half(line + t * tile_bytes + 32 * g + 2 * lane);
          minimum[t] = kMinimum ? load_half(line + t * tile_bytes + 32 + 2 * lane) : F{};
        }
        for (int part = 0; part < parts; part++) {
          I dots[T][R];
          dot_group<T, R, kBits, kStarts, kPlanes>(weights, tile_bytes, lane, q, scales + 2 * stride, later(weights),
                                                   dots);
          for (int r = 0; r < R; r++) {
            for (int t = 0; t < T; t++) {
              sums[t][r] = fma(to_float(dots[t][r]), scale[t] * splat(scales[r]), sums[t][r]);
              if (kMinimum) sums[t][r] = fma(minimum[t], splat(scales[stride + r]), sums[t][r]);
            }
          }
          weights += kGroupBytes;
          q += stride * kGroup * kPlanes;
          scales += stride * 3;
        }
      }
    }
    for (int t = 0; t < T; t++)
      for (int r = 0; r < R; r++) store(out + (t * kRowBlock + r) * kTile + lane, sums[t][r]);
  }
}

// All rows of a block and `tiles` tiles, as many at a time as the registers hold.
template <int kBits, bool kMinimum, int kPlanes>
void integer_block(const LinearConfig& config, const uint8_t* tile, int tiles, const int8_t* integers,
                   const float* scales, int rows, float* out) {
#if defined(SPECEXPORT_AVX512)
  // Two tiles of up to eight rows are 16 sums of integers; the float sums may then lie in memory, used once a group.
  const auto some = [&](auto rows_of) {
    constexpr int R = decltype(rows_of)::value, kPair = R * kPlanes <= 8 ? 2 : 1;
    if (tiles == kPair)
      return integer_tiles<kPair, R, kBits, kMinimum, kPlanes>(config, tile, integers, scales, R, out);
    for (int t = 0; t < tiles; t++)
      integer_tiles<1, R, kBits, kMinimum, kPlanes>(config, tile + t * config.tile_bytes(), integers, scales, R,
                                                    out + t * kRowBlock * kTile);
  };
  switch (rows) {
    case 1: return some(std::integral_constant<int, 1>());
    case 2: return some(std::integral_constant<int, 2>());
    case 3: return some(std::integral_constant<int, 3>());
    case 4: return some(std::integral_constant<int, 4>());
    case 5: return some(std::integral_constant<int, 5>());
    case 6: return some(std::integral_constant<int, 6>());
    case 7: return some(std::integral_constant<int, 7>());
    default: return some(std::integral_constant<int, 8>());
  }
#else
  for (int t = 0; t < tiles; t++, tile += config.tile_bytes(), out += kRowBlock * kTile) {
    const auto some = [&](auto tile_of, int r) {
      tile_of(config, tile, integers + r * kGroup * kPlanes, scales + r, rows, out + r * kTile);
    };
    int r = 0;
    if (kPlanes == 1) {  // two planes of four rows would not fit the registers
      for (; r + 4 <= rows; r += 4) some(integer_tiles<1, 4, kBits, kMinimum, kPlanes>, r);
    }
    for (; r + 2 <= rows; r += 2) some(integer_tiles<1, 2, kBits, kMinimum, kPlanes>, r);
    for (; r < rows; r++) some(integer_tiles<1, 1, kBits, kMinimum, kPlanes>, r);
  }
#endif
}

// The same for the matrix's own format.
template <int kPlanes>
SPECEXPORT_INLINE void integer_sums(const LinearConfig& config, const uint8_t* tile, int tiles, const int8_t* integers,
                                    const float* scales, int rows, float* out) {
  if (config.bits == 4) {
    if (config.has_minimum) return integer_block<4, true, kPlanes>(config, tile, tiles, integers, scales, rows, out);
    return integer_block<4, false, kPlanes>(config, tile, tiles, integers, scales, rows, out);
  }
  if (config.has_minimum) return integer_block<8, true, kPlanes>(config, tile, tiles, integers, scales, rows, out);
  return integer_block<8, false, kPlanes>(config, tile, tiles, integers, scales, rows, out);
}
