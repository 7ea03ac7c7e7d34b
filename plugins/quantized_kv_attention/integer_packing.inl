// Blocks of int8 caches in the order of tiles of integers. Included after a file of AVX-512 vectors.

// What stands in for rows that a block does not have.
alignas(64) static const int8_t kNoRow[kMaxHeadDim] = {};

// Rows of the cache are asked for this many ahead of their use. Rows beyond the memory do no harm.
constexpr int kRowsAhead = 64;

static inline void prefetch_rows(const int8_t* cache, int64_t first, int count, int dim) {
  const uintptr_t rows = reinterpret_cast<uintptr_t>(cache) + first * dim;
  for (int64_t i = 0; i < static_cast<int64_t>(count) * dim; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(rows + i), _MM_HINT_T0);
}

// Sixteen bytes of each of four rows, one a lane of 128 bits.
static inline __m512i four_rows(const int8_t* const* rows, int stride, int d) {
  const auto at = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i * stride] + d)); };
  __m512i v = _mm512_castsi128_si512(at(0));
  v = _mm512_mask_broadcast_i32x4(v, 0x00f0, at(1));
  v = _mm512_mask_broadcast_i32x4(v, 0x0f00, at(2));
  return _mm512_mask_broadcast_i32x4(v, 0xf000, at(3));
}

// Keys [0, count) of a chunk to tiles[key / 16][d / 4][key % 16][d % 4]; every byte is turned by `flip`, so that 0x80
// gives key + 128 without a sign. Keys up to a multiple of 16 are filled.
// The values of the same positions are asked for.
static void pack_keys(const int8_t* cache, const int8_t* values, int count, int dim, int flip, uint8_t* tiles) {
  const __m512i turn = _mm512_set1_epi8(static_cast<char>(flip));
  for (int first = 0; first < count; first += kTile, tiles += kTile * dim) {
    prefetch_rows(cache, first + kRowsAhead, kTile, dim);
    prefetch_rows(values, first, kTile, dim);
    const int8_t* rows[kTile];
    for (int i = 0; i < kTile; i++) rows[i] = first + i < count ? cache + static_cast<int64_t>(first + i) * dim : kNoRow;
    for (int d = 0; d < dim; d += 16) {
      // Lane l of v[j] is key 4 l + j: a transposition of 4 x 4 words in every lane puts keys side by side.
      __m512i v[4];
      for (int j = 0; j < 4; j++) v[j] = _mm512_xor_si512(four_rows(rows + j, 4, d), turn);
      const __m512i low01 = _mm512_unpacklo_epi32(v[0], v[1]), low23 = _mm512_unpacklo_epi32(v[2], v[3]);
      const __m512i high01 = _mm512_unpackhi_epi32(v[0], v[1]), high23 = _mm512_unpackhi_epi32(v[2], v[3]);
      uint8_t* out = tiles + d * kTile;
      _mm512_storeu_si512(out, _mm512_unpacklo_epi64(low01, low23));
      _mm512_storeu_si512(out + 64, _mm512_unpackhi_epi64(low01, low23));
      _mm512_storeu_si512(out + 128, _mm512_unpacklo_epi64(high01, high23));
      _mm512_storeu_si512(out + 192, _mm512_unpackhi_epi64(high01, high23));
    }
  }
}

// Which row of four keys of a packed block of values holds keys 4 i to 4 i + 3: the order in which weights_to_planes
// leaves its bytes.
static inline int packed_row(int i) { return 4 * (i % 4) + i / 4; }

// Values [0, count) of a chunk to tiles[key / 64][d / 16][packed row of key][d % 16][key % 4]. Keys up to a multiple of
// 64 are filled.
static void pack_values(const int8_t* cache, int count, int dim, int8_t* tiles) {
  const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  for (int block = 0; block < count; block += kBlock, tiles += kBlock * dim) {
    for (int i = 0; i < kBlock / 4; i++) {
      const int8_t* rows[4];
      for (int k = 0; k < 4; k++) {
        const int key = block + 4 * i + k;
        rows[k] = key < count ? cache + static_cast<int64_t>(key) * dim : kNoRow;
      }
      int8_t* out = tiles + packed_row(i) * 64;
      for (int d = 0; d < dim; d += kTile) {
        const __m512i v = _mm512_permutexvar_epi32(words, four_rows(rows, 1, d));
        _mm512_storeu_si512(out + d / kTile * kBlock * kTile, _mm512_shuffle_epi8(v, bytes));
      }
    }
  }
}

// Scales [count, groups] as floats [groups, kChunk]; 0 up to a multiple of kBlock.
static void load_scales(const uint16_t* scales, int count, int groups, float* out) {
  for (int g = 0; g < groups; g++) {
    float* line = out + g * kChunk;
    int i = 0;
    if (groups == 1) {
      for (; i + kWidth <= count; i += kWidth) store(line + i, load_half(scales + i));
    }
    for (; i < count; i++) line[i] = half_to_float(scales[i * groups + g]);
    for (; i % kBlock != 0; i++) line[i] = 0;
  }
}
