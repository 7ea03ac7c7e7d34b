// Attention over the cache. Included after tiles.inl. Nothing here or there calls a function or a template of the
// standard library, whose one shared copy might be compiled for an instruction set that the machine lacks.
//
// Bits of a row: its scores are sums over channels in order, one lane a key; the softmax of a chunk runs over absolute
// positions; weighted sums run over keys in order, one lane a channel; chunks are merged from the first to the last.
// Tiles only choose how many rows do this side by side.

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The positions of `block` (absolute start) that row r of an item attends, relative to the block.
struct Span {
  int first, end;
};
static inline Span span(const Call& call, const Item& item, int r, int64_t start, int length) {
  const int64_t position = call.past[item.b] + item.s0 + r / call.repeats;
  const int64_t first = larger(first_position(call, position) - start, 0), end = smaller(position + 1 - start, length);
  return first < end ? Span{static_cast<int>(first), static_cast<int>(end)} : Span{0, 0};
}

static inline int row_count(const Call& call, const Item& item) {
  return static_cast<int>(item.s1 - item.s0) * call.repeats;
}

// Adds a block's values, under the weights of the item's rows, to the sums of its chunk.
template <class Values>
static inline void weigh_block(const Call& call, const Item& item, int64_t block, const Values& values,
                               const Scratch& t) {
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
      weigh_some(n, t.scores + static_cast<int64_t>(r) * kChunk + within, values, attended.first, attended.end,
                 call.head_dim, padded, t.chunk + static_cast<int64_t>(r) * padded);
    }
    r += n;
  }
}

// Weighted sums, maxima and denominators of one chunk for the item's rows; rows that attend nothing in it keep
// denominator 0 (every other one is at least 1, or NaN).
static void attend_positions(const Call& call, const Item& item, int64_t chunk, const float* queries,
                             const Scratch& t) {
  const int dim = call.head_dim, padded = call.padded_dim(), rows = row_count(call, item);
  const int64_t start = chunk * kChunk, head = item.b * call.kv_heads + item.kv_head;
  const int64_t past = call.past[item.b];
  const int64_t low = first_position(call, past + item.s0), high = smaller(past + item.s1, start + kChunk);
  const int64_t first_block = larger(low, start) / kBlock * kBlock;
  const float* q = queries + (head * call.rows + item.s0) * call.repeats * dim;

  for (int64_t block = first_block; block < high; block += kBlock) {
    const int count = static_cast<int>(smaller(high - block, kBlock));
    load_keys(call.key, head * call.capacity + block, count, dim, t.keys);
    for (int r = 0; r < rows;) {
      const Span attended = span(call, item, r, block, kBlock);
      if (attended.first == attended.end) {
        r++;
        continue;
      }
      const int n = rows - r < kTileRows ? rows - r : kTileRows;
      score_some(n, q + static_cast<int64_t>(r) * dim, dim, t.keys,
                 t.scores + static_cast<int64_t>(r) * kChunk + (block - start));
      r += n;
    }
  }
  for (int r = 0; r < rows; r++) {
    const Span attended = span(call, item, r, start, kChunk);
    t.chunk_denominator[r] = 0;
    if (attended.first == attended.end) continue;
    soften(call, t.scores + static_cast<int64_t>(r) * kChunk, attended.first, attended.end, t.chunk_maximum + r,
           t.chunk_denominator + r);
  }
  __builtin_memset(t.chunk, 0, sizeof(float) * rows * padded);
  // Rows of a single tile take the values from the cache; for more the block is dequantized once.
  const bool direct = rows <= kTileRows && dim % kWidth == 0 && call.value.group_size % kWidth == 0;
  for (int64_t block = first_block; block < high; block += kBlock) {
    const int count = static_cast<int>(smaller(high - block, kBlock));
    const int64_t at = head * call.capacity + block;
    const auto weigh = [&](const auto& values) { weigh_block(call, item, block, values, t); };
    if (!direct) {
      load_values(call.value, at, count, dim, padded, t.values);
      weigh(FloatValues{t.values, padded});
    } else if (call.value.bits == 16) {
      weigh(HalfValues{static_cast<const uint16_t*>(call.value.rows) + at * dim, dim});
    } else {
      const int groups = dim / call.value.group_size;
      load_factors(call.value.scales + at * groups, count * groups, t.values);
      const int8_t* cache = static_cast<const int8_t*>(call.value.rows) + at * dim;
      weigh(Int8Values{cache, t.values, dim, call.value.group_size, groups});
    }
  }
}

// Puts a chunk's result after those of the chunks before it. A total denominator of 0 stands for none before.
static inline void merge(const float* sums, float chunk_maximum, float chunk_denominator, int dim, float* total,
                         float* total_maximum, float* total_denominator) {
  if (*total_denominator == 0) {
    __builtin_memcpy(total, sums, sizeof(float) * lanes(dim));
    *total_maximum = chunk_maximum;
    *total_denominator = chunk_denominator;
    return;
  }
  const float top = chunk_maximum > *total_maximum ? chunk_maximum : *total_maximum;
  const float before = exponential(*total_maximum - top), now = exponential(chunk_maximum - top);
  for (int d = 0; d < dim; d += kWidth)
    store(total + d, fma(load(sums + d), splat(now), load(total + d) * splat(before)));
  *total_maximum = top;
  *total_denominator = *total_denominator * before + chunk_denominator * now;
}

// y of the item's row r from its total.
static void finish(const Call& call, const Item& item, int r, float* total, float top, float denominator) {
  const int h = item.kv_head * call.repeats + r % call.repeats;
  float factor = 1;
  if (call.sinks != nullptr) {
    const float sink = call.sinks[h], both = sink > top ? sink : top;
    factor = exponential(top - both);
    denominator = denominator * factor + exponential(sink - both);
  }
  const Vector scale = splat(factor) / splat(denominator);
  for (int d = 0; d < call.head_dim; d += kWidth) store(total + d, load(total + d) * scale);
  const int64_t row = item.b * call.rows + item.s0 + r / call.repeats;
  __builtin_memcpy(call.y + (row * call.q_heads + h) * call.head_dim, total, sizeof(float) * call.head_dim);
}

static void attend(const Call& call, const Item& item, const float* queries, const Scratch& t) {
  const int padded = call.padded_dim(), rows = row_count(call, item);
  for (int r = 0; r < rows; r++) t.denominator[r] = 0;
  for (int64_t chunk = item.first; chunk <= item.last; chunk++) {
    attend_positions(call, item, chunk, queries, t);
    for (int r = 0; r < rows; r++) {
      if (t.chunk_denominator[r] == 0) continue;
      merge(t.chunk + static_cast<int64_t>(r) * padded, t.chunk_maximum[r], t.chunk_denominator[r], call.head_dim,
            t.total + static_cast<int64_t>(r) * padded, t.maximum + r, t.denominator + r);
    }
  }
  for (int r = 0; r < rows; r++)
    finish(call, item, r, t.total + static_cast<int64_t>(r) * padded, t.maximum[r], t.denominator[r]);
}

static void attend_chunk(const Call& call, const Item& item, const float* queries, const Scratch& t,
                         const Partials& partials) {
  const int padded = call.padded_dim(), rows = row_count(call, item);
  const int64_t head = item.b * call.kv_heads + item.kv_head;
  attend_positions(call, item, item.first, queries, t);
  for (int r = 0; r < rows; r++) {
    const int64_t place = (head * partials.rows + r) * partials.chunks + item.first;
    partials.maxima[place] = t.chunk_maximum[r];
    partials.denominators[place] = t.chunk_denominator[r];
    __builtin_memcpy(partials.sums + place * padded, t.chunk + static_cast<int64_t>(r) * padded,
                     sizeof(float) * padded);
  }
  if (__atomic_sub_fetch(partials.unfinished + head, 1, __ATOMIC_ACQ_REL) > 0) return;
  const int64_t past = call.past[item.b];
  const int64_t first = first_position(call, past + item.s0) / kChunk, last = (past + item.s1 - 1) / kChunk;
  for (int r = 0; r < rows; r++) {
    float top = 0, denominator = 0;
    for (int64_t chunk = first; chunk <= last; chunk++) {
      const int64_t place = (head * partials.rows + r) * partials.chunks + chunk;
      if (partials.denominators[place] == 0) continue;
      merge(partials.sums + place * padded, partials.maxima[place], partials.denominators[place], call.head_dim,
            t.total, &top, &denominator);
    }
    finish(call, item, r, t.total, top, denominator);
  }
}
