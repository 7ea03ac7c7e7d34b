// Attention over the cache, chunk by chunk. Included after softmax.inl and spans.inl. `Chunks` does a chunk: in float
// (float_chunks.inl) or in integers (integer_chunks.inl): weighted sums, maxima and denominators of one chunk for the
// item's rows; rows that attend nothing in it get denominator 0 (every other one is at least 1, or NaN).

// Puts a chunk's result after those of the chunks before it. A total denominator of 0 stands for none before.
static inline void merge(const float* sums, float chunk_maximum, float chunk_denominator, int dim, float* total,
                         float* total_maximum, float* total_denominator) {
  if (*total_denominator == 0) {
    __builtin_memcpy(total, sums, sizeof(float) * lanes(dim));
    *total_maximum = chunk_maximum;
    *total_denominator = chunk_denominator;
    return;
  }
  // The factor of whichever is larger is 1; the other's is NaN where either is.
  const bool grows = chunk_maximum > *total_maximum;
  const float top = grows ? chunk_maximum : *total_maximum;
  const float factor = power_of_two((grows ? *total_maximum : chunk_maximum) - top);
  const float before = grows ? factor : 1.0f, now = grows ? 1.0f : factor;
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
    const float sink = call.sinks[h] * kLog2E, both = sink > top ? sink : top;
    factor = power_of_two(top - both);
    denominator = denominator * factor + power_of_two(sink - both);
  }
  const Vector scale = splat(factor) / splat(denominator);
  for (int d = 0; d < call.head_dim; d += kWidth) store(total + d, load(total + d) * scale);
  const int64_t row = item.b * call.rows + item.s0 + r / call.repeats;
  __builtin_memcpy(call.y + (row * call.q_heads + h) * call.head_dim, total, sizeof(float) * call.head_dim);
}

template <class Chunks>
static void attend(const Call& call, const Item& item, const float* queries, const Scratch& t) {
  const int padded = call.padded_dim(), rows = row_count(call, item);
  Chunks chunks(call, item, queries, t);
  for (int r = 0; r < rows; r++) t.denominator[r] = 0;
  for (int64_t chunk = item.first; chunk <= item.last; chunk++) {
    chunks.attend(chunk);
    for (int r = 0; r < rows; r++) {
      if (t.chunk_denominator[r] == 0) continue;
      merge(t.chunk + static_cast<int64_t>(r) * padded, t.chunk_maximum[r], t.chunk_denominator[r], call.head_dim,
            t.total + static_cast<int64_t>(r) * padded, t.maximum + r, t.denominator + r);
    }
  }
  for (int r = 0; r < rows; r++)
    finish(call, item, r, t.total + static_cast<int64_t>(r) * padded, t.maximum[r], t.denominator[r]);
}

template <class Chunks>
static void attend_chunk(const Call& call, const Item& item, const float* queries, const Scratch& t,
                         const Partials& partials) {
  const int padded = call.padded_dim(), rows = row_count(call, item);
  const int64_t head = item.b * call.kv_heads + item.kv_head;
  Chunks(call, item, queries, t).attend(item.first);
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
