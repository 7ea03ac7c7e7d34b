// A chunk of the cache attended in float, for caches of every kind. Included after tiles.inl, softmax.inl, spans.inl.

// Adds a block's values, under the weights of the item's rows, to the sums of its chunk.
template <class Values>
static inline void weigh_block(const Call& call, const Item& item, int64_t block, const Values& values,
                               const Scratch& t, const FloatBlocks& blocks) {
  const int padded = call.padded_dim(), rows = row_count(call, item), within = static_cast<int>(block % kChunk);
  for (int r = 0; r < rows;) {
    // Rows of one tile attend the same positions: a weight of 0 times a NaN that is not attended would be NaN.
    const Span attended = span(call, item, r, block, kBlock);
    int n = 1;
    for (; n < kTileRows && r + n < rows; n++) {
      const Span other = span(call, item, r + n, block, kBlock);
      if (other.first != attended.first || other.end != attended.end) break;
    }
    if (attended.first < attended.end) {
      weigh_some(n, blocks.scores + static_cast<int64_t>(r) * kChunk + within, values, attended.first, attended.end,
                 call.head_dim, padded, t.chunk + static_cast<int64_t>(r) * padded);
    }
    r += n;
  }
}

static void attend_in_float(const Call& call, const Item& item, int64_t chunk, const float* queries, const Scratch& t) {
  const FloatBlocks blocks(t.blocks, call, t.rows);
  const int dim = call.head_dim, padded = call.padded_dim(), rows = row_count(call, item);
  const int64_t start = chunk * kChunk, head = item.b * call.kv_heads + item.kv_head;
  const int64_t past = call.past[item.b];
  const int64_t low = first_position(call, past + item.s0), high = smaller(past + item.s1, start + kChunk);
  const int64_t first_block = larger(low, start) / kBlock * kBlock;
  const float* q = queries + (head * call.rows + item.s0) * call.repeats * dim;

  for (int64_t block = first_block; block < high; block += kBlock) {
    const int count = static_cast<int>(smaller(high - block, kBlock));
    load_keys(call.key, head * call.capacity + block, count, dim, blocks.keys);
    for (int r = 0; r < rows;) {
      const Span attended = span(call, item, r, block, kBlock);
      if (attended.first == attended.end) {
        r++;
        continue;
      }
      const int n = rows - r < kTileRows ? rows - r : kTileRows;
      score_some(n, q + static_cast<int64_t>(r) * dim, dim, blocks.keys,
                 blocks.scores + static_cast<int64_t>(r) * kChunk + (block - start));
      r += n;
    }
  }
  for (int r = 0; r < rows; r++) {
    const Span attended = span(call, item, r, start, kChunk);
    t.chunk_denominator[r] = 0;
    if (attended.first == attended.end) continue;
    soften(call.softcap, score_factor(call), blocks.scores + static_cast<int64_t>(r) * kChunk, attended.first,
           attended.end, t.chunk_maximum + r, t.chunk_denominator + r);
  }
  __builtin_memset(t.chunk, 0, sizeof(float) * rows * padded);
  // Rows of a single tile take the values from the cache; for more the block is dequantized once.
  const bool direct = rows <= kTileRows && dim % kWidth == 0 && call.value.group_size % kWidth == 0;
  for (int64_t block = first_block; block < high; block += kBlock) {
    const int count = static_cast<int>(smaller(high - block, kBlock));
    const int64_t at = head * call.capacity + block;
    const auto weigh = [&](const auto& values) { weigh_block(call, item, block, values, t, blocks); };
    if (!direct) {
      load_values(call.value, at, count, dim, padded, blocks.values);
      weigh(FloatValues{blocks.values, padded});
    } else if (call.value.bits == 16) {
      weigh(HalfValues{static_cast<const uint16_t*>(call.value.rows) + at * dim, dim});
    } else {
      const int groups = dim / call.value.group_size;
      load_factors(call.value.scales + at * groups, count * groups, blocks.values);
      const int8_t* cache = static_cast<const int8_t*>(call.value.rows) + at * dim;
      weigh(Int8Values{cache, blocks.values, dim, call.value.group_size, groups});
    }
  }
}

class FloatChunks {
 public:
  FloatChunks(const Call& call, const Item& item, const float* queries, const Scratch& scratch)
      : call_(call), item_(item), queries_(queries), scratch_(scratch) {}
  void attend(int64_t chunk) const { attend_in_float(call_, item_, chunk, queries_, scratch_); }

 private:
  const Call& call_;
  const Item& item_;
  const float* queries_;
  const Scratch& scratch_;
};
