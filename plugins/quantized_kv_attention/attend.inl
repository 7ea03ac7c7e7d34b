// Attention over the cache. Included after a file of vectors; nothing here calls a function or a template of the
// standard library, whose one shared copy might be compiled for an instruction set that the machine lacks.
//
// Bits of a row: its scores are sums over channels in order, one lane a key; the softmax of a chunk runs over absolute
// positions; weighted sums run over keys in order, one lane a channel; chunks are merged from the first to the last.
// Tiles only choose how many rows do this side by side.

// Relative error about 1e-7 from -87 to 88; 0 below, NaN stays NaN.
static inline Vector exponential(Vector x) {
  const Vector n = round_even(min(splat(127), max(splat(-126), x * splat(1.44269504f))));
  const Vector r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  Vector p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1);
  return select_less(x, splat(-87.0f), splat(0), scale_by_power(p, n));
}

// Channels as far as vectors reach; a row's memory reaches as far.
static inline int lanes(int dim) { return (dim + kWidth - 1) / kWidth * kWidth; }

static inline float exponential(float x) {
  float out[kWidth];
  store(out, exponential(splat(x)));
  return out[0];
}

static inline Vector tangent(Vector x) {
  const Vector size = magnitude(x), square = x * x;
  Vector p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  const Vector small = fma(p * square, x, x);
  const Vector large = splat(1) - splat(2) / (exponential(min(splat(30), size + size)) + splat(1));
  return select_less(size, splat(0.625f), small, copy_sign(large, x));
}

// Scales of `count` rows as floats, in the cache's order [count, groups].
static void load_factors(const uint16_t* scales, int count, float* factors) {
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) store(factors + i, load_half(scales + i));
  for (; i < count; i++) factors[i] = half_to_float(scales[i]);
}

// keys[d][i]: the block's key i, dequantized; keys from `count` on are 0.
static void load_keys(const CacheSide& side, int64_t at, int count, int dim, float* keys) {
  if (side.bits == 16) {
    const uint16_t* rows = static_cast<const uint16_t*>(side.rows) + at * dim;
    for (int i = 0; i < kBlock; i += kWidth) {
      const int n = count - i < 0 ? 0 : count - i < kWidth ? count - i : kWidth;
      transpose_half(rows + static_cast<int64_t>(i) * dim, n, dim, keys + i);
    }
    return;
  }
  const int groups = dim / side.group_size;
  alignas(64) float factors[kBlock * kMaxHeadDim / 8];
  alignas(64) float by_group[kMaxHeadDim / 8 * kBlock];  // [groups, kBlock], 0 from `count` on.
  load_factors(side.scales + at * groups, count * groups, factors);
  for (int g = 0; g < groups; g++) {
    for (int i = 0; i < count; i++) by_group[g * kBlock + i] = factors[i * groups + g];
    for (int i = count; i < kBlock; i++) by_group[g * kBlock + i] = 0;
  }
  const int8_t* rows = static_cast<const int8_t*>(side.rows) + at * dim;
  for (int i = 0; i < kBlock; i += kWidth) {
    const int n = count - i < 0 ? 0 : count - i < kWidth ? count - i : kWidth;
    transpose_int8(rows + static_cast<int64_t>(i) * dim, n, dim, by_group + i, side.group_size, keys + i);
  }
}

// values[i][d]: the block's value row i, dequantized.
static void load_values(const CacheSide& side, int64_t at, int count, int dim, int padded, float* values) {
  if (side.bits == 16) {
    const uint16_t* rows = static_cast<const uint16_t*>(side.rows) + at * dim;
    for (int i = 0; i < count; i++) {
      const uint16_t* row = rows + static_cast<int64_t>(i) * dim;
      float* out = values + static_cast<int64_t>(i) * padded;
      int d = 0;
      for (; d + kWidth <= dim; d += kWidth) store(out + d, load_half(row + d));
      if (d < dim) store(out + d, load_eight_half(row + d));
    }
    return;
  }
  const int groups = dim / side.group_size;
  const int8_t* rows = static_cast<const int8_t*>(side.rows) + at * dim;
  alignas(64) float factors[kBlock * kMaxHeadDim / 8];
  load_factors(side.scales + at * groups, count * groups, factors);
  for (int i = 0; i < count; i++) {
    const int8_t* row = rows + static_cast<int64_t>(i) * dim;
    float* out = values + static_cast<int64_t>(i) * padded;
    for (int g = 0, d = 0; g < groups; g++) {
      const Vector factor = splat(factors[i * groups + g]);
      const int end = d + side.group_size;
      for (; d + kWidth <= end; d += kWidth) store(out + d, load_int8(row + d) * factor);
      if (d < end) {  // Half a vector.
        store_eight(out + d, load_eight_int8(row + d) * factor);
        d = end;
      }
    }
    for (int d = dim; d < lanes(dim); d++) out[d] = 0;
  }
}

// scores[r][i] = sum over d of q[r][d] keys[d][i], for N vectors of keys.
template <int R, int N>
static inline void score_tile(const float* q, int dim, const float* keys, float* scores) {
  Vector sums[R][N];
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) sums[r][n] = splat(0);
  }
  for (int d = 0; d < dim; d++) {
    Vector key[N];
    for (int n = 0; n < N; n++) key[n] = load(keys + d * kBlock + n * kWidth);
    for (int r = 0; r < R; r++) {
      const Vector x = splat(q[r * dim + d]);
      for (int n = 0; n < N; n++) sums[r][n] = fma(x, key[n], sums[r][n]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) store(scores + r * kChunk + n * kWidth, sums[r][n]);
  }
}

// sums[r][d] += sum over keys i in [first, end) of weights[r][i] values[i][d], for N vectors of channels.
template <int R, int N>
static inline void weigh_tile(const float* weights, const float* values, int first, int end, int padded, float* sums) {
  Vector total[R][N];
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) total[r][n] = load(sums + r * padded + n * kWidth);
  }
  for (int i = first; i < end; i++) {
    Vector value[N];
    for (int n = 0; n < N; n++) value[n] = load(values + i * padded + n * kWidth);
    for (int r = 0; r < R; r++) {
      const Vector x = splat(weights[r * kChunk + i]);
      for (int n = 0; n < N; n++) total[r][n] = fma(x, value[n], total[r][n]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) store(sums + r * padded + n * kWidth, total[r][n]);
  }
}

template <int R>
static void score_rows(const float* q, int dim, const float* keys, float* scores) {
  for (int i = 0; i < kBlock; i += kKeyVectors * kWidth) score_tile<R, kKeyVectors>(q, dim, keys + i, scores + i);
}

template <int R>
static void weigh_rows(const float* weights, const float* values, int first, int end, int dim, int padded, float* sums) {
  int d = 0;
  for (; d + kKeyVectors * kWidth <= lanes(dim); d += kKeyVectors * kWidth)
    weigh_tile<R, kKeyVectors>(weights, values + d, first, end, padded, sums + d);
  for (; d < dim; d += kWidth) weigh_tile<R, 1>(weights, values + d, first, end, padded, sums + d);
}

static void score_some(int rows, const float* q, int dim, const float* keys, float* scores) {
  switch (rows) {
    case 1: return score_rows<1>(q, dim, keys, scores);
    case 2: return score_rows<2>(q, dim, keys, scores);
    case 3: return score_rows<3>(q, dim, keys, scores);
    case 4: return score_rows<4>(q, dim, keys, scores);
    case 5: return score_rows<5>(q, dim, keys, scores);
    default: return score_rows<6>(q, dim, keys, scores);
  }
}

static void weigh_some(int rows, const float* weights, const float* values, int first, int end, int dim, int padded,
                       float* sums) {
  switch (rows) {
    case 1: return weigh_rows<1>(weights, values, first, end, dim, padded, sums);
    case 2: return weigh_rows<2>(weights, values, first, end, dim, padded, sums);
    case 3: return weigh_rows<3>(weights, values, first, end, dim, padded, sums);
    case 4: return weigh_rows<4>(weights, values, first, end, dim, padded, sums);
    case 5: return weigh_rows<5>(weights, values, first, end, dim, padded, sums);
    default: return weigh_rows<6>(weights, values, first, end, dim, padded, sums);
  }
}

// Scores of positions [first, end) of a chunk become weights e^(score - maximum), other positions' become 0 as far as
// vectors reach; `denominator` gets their sum.
static void soften(const Call& call, float* scores, int first, int end, float* maximum_out, float* denominator_out) {
  const int from = first / kWidth * kWidth, to = (end + kWidth - 1) / kWidth * kWidth;
  for (int i = from; i < to; i += kWidth) {
    Vector score = load(scores + i) * splat(call.scale);
    if (call.softcap > 0) score = tangent(score / splat(call.softcap)) * splat(call.softcap);
    store(scores + i, score);
  }
  for (int i = from; i < first; i++) scores[i] = -__builtin_inff();
  for (int i = end; i < to; i++) scores[i] = -__builtin_inff();
  Vector largest = splat(-__builtin_inff());  // Without NaN, which the sum keeps.
  for (int i = from; i < to; i += kWidth) largest = max(load(scores + i), largest);
  const float top = maximum(largest);
  Vector total = splat(0);
  for (int i = from; i < to; i += kWidth) {
    const Vector weight = exponential(load(scores + i) - splat(top));
    store(scores + i, weight);
    total = total + weight;
  }
  *maximum_out = top;
  *denominator_out = sum(total);
}

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

// Weighted sums, maxima and denominators of one chunk for the item's rows; rows that attend nothing in it keep
// denominator 0 (every other one is at least 1, or NaN).
static void attend_positions(const Call& call, const Item& item, int64_t chunk, const float* queries, const Scratch& t) {
  const int dim = call.head_dim, padded = call.padded_dim(), rows = static_cast<int>(item.s1 - item.s0) * call.repeats;
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
      score_some(n, q + static_cast<int64_t>(r) * dim, dim, t.keys, t.scores + static_cast<int64_t>(r) * kChunk + (block - start));
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
  for (int64_t block = first_block; block < high; block += kBlock) {
    const int count = static_cast<int>(smaller(high - block, kBlock));
    load_values(call.value, head * call.capacity + block, count, dim, padded, t.values);
    for (int r = 0; r < rows;) {
      // Rows of one tile attend the same positions: a weight of 0 times a NaN that is not attended would be NaN.
      const Span attended = span(call, item, r, block, kBlock);
      int n = 1;
      for (; n < kTileRows && r + n < rows; n++) {
        const Span other = span(call, item, r + n, block, kBlock);
        if (other.first != attended.first || other.end != attended.end) break;
      }
      if (attended.first < attended.end) {
        weigh_some(n, t.scores + static_cast<int64_t>(r) * kChunk + (block - start), t.values, attended.first, attended.end,
                   dim, padded, t.chunk + static_cast<int64_t>(r) * padded);
      }
      r += n;
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
  const int padded = call.padded_dim(), rows = static_cast<int>(item.s1 - item.s0) * call.repeats;
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
  const int padded = call.padded_dim(), rows = static_cast<int>(item.s1 - item.s0) * call.repeats;
  const int64_t head = item.b * call.kv_heads + item.kv_head;
  attend_positions(call, item, item.first, queries, t);
  for (int r = 0; r < rows; r++) {
    const int64_t place = (head * partials.rows + r) * partials.chunks + item.first;
    partials.maxima[place] = t.chunk_maximum[r];
    partials.denominators[place] = t.chunk_denominator[r];
    __builtin_memcpy(partials.sums + place * padded, t.chunk + static_cast<int64_t>(r) * padded, sizeof(float) * padded);
  }
  if (__atomic_sub_fetch(partials.unfinished + head, 1, __ATOMIC_ACQ_REL) > 0) return;
  const int64_t past = call.past[item.b];
  const int64_t first = first_position(call, past + item.s0) / kChunk, last = (past + item.s1 - 1) / kChunk;
  for (int r = 0; r < rows; r++) {
    float top = 0, denominator = 0;
    for (int64_t chunk = first; chunk <= last; chunk++) {
      const int64_t place = (head * partials.rows + r) * partials.chunks + chunk;
      if (partials.denominators[place] == 0) continue;
      merge(partials.sums + place * padded, partials.maxima[place], partials.denominators[place], call.head_dim, t.total, &top,
            &denominator);
    }
    finish(call, item, r, t.total, top, denominator);
  }
}
