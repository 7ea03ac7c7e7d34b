// A chunk of the cache attended in integers, where both caches are int8: each sum of products is of the cache's own
// bytes with a query or weights of three bytes, exact in any order; scales come after the sums. Included after a file of
// Dots.

class IntegerChunks {
 public:
  IntegerChunks(const Call& call, const Item& item, const float* queries, const Scratch& scratch)
      : call_(call),
        item_(item),
        scratch_(scratch),
        blocks_(scratch.blocks, call, scratch.rows),
        rows_(row_count(call, item)),
        key_groups_(call.head_dim / call.key.group_size),
        dots_(call.key.group_size) {
    const int64_t head = item.b * call.kv_heads + item.kv_head;
    const float* q = queries + (head * call.rows + item.s0) * call.repeats * call.head_dim;
    for (int r = 0; r < rows_; r++, q += call.head_dim) {
      const int within = r % kTile;
      blocks_.query_steps[r] = query_to_planes(q, call.head_dim, call.key.group_size,
                                               tile_queries(r) + within * call.head_dim, tile_sums(r) + within);
    }
  }

  void attend(int64_t chunk) {
    const int64_t start = chunk * kChunk;
    pack(start);
    for (int r = 0; r < rows_; r += kTile) attend_tile(start, r);
  }

 private:
  int8_t* tile_queries(int r) const { return blocks_.queries + r / kTile * kPlanes * kTile * call_.head_dim; }
  int32_t* tile_sums(int r) const { return blocks_.query_sums + r / kTile * key_groups_ * kPlanes * kTile; }

  // Packs the part of the chunk that any row attends.
  void pack(int64_t start) const {
    const int dim = call_.head_dim, value_groups = dim / call_.value.group_size;
    const int64_t past = call_.past[item_.b];
    const int begin =
        static_cast<int>(larger(first_position(call_, past + item_.s0) - start, 0)) / kBlock * kBlock;
    const int count = static_cast<int>(smaller(past + item_.s1 - start, kChunk)) - begin;
    const int64_t at = (item_.b * call_.kv_heads + item_.kv_head) * call_.capacity + start + begin;
    const int8_t* keys = static_cast<const int8_t*>(call_.key.rows) + at * dim;
    const int8_t* values = static_cast<const int8_t*>(call_.value.rows) + at * dim;
    pack_keys(keys, values, count, dim, Dots::kFlip, blocks_.keys + begin * dim);
    pack_values(values, count, dim, blocks_.values + begin * dim);
    load_scales(call_.key.scales + at * key_groups_, count, key_groups_, blocks_.key_scales + begin);
    load_scales(call_.value.scales + at * value_groups, count, value_groups, blocks_.value_scales + begin);
  }

  // Rows from r0 on, as many as a tile has.
  void attend_tile(int64_t start, int r0) {
    const int rows = rows_ - r0 < kTile ? rows_ - r0 : kTile;
    Span spans[kTile], all{kChunk, 0};
    for (int r = 0; r < rows; r++) {
      spans[r] = span(call_, item_, r0 + r, start, kChunk);
      scratch_.chunk_denominator[r0 + r] = 0;
      if (spans[r].first == spans[r].end) continue;
      all = {static_cast<int>(smaller(all.first, spans[r].first)), static_cast<int>(larger(all.end, spans[r].end))};
    }
    if (all.first >= all.end) return;
    dots_.set_rows(rows);
    score(all, r0, rows);
    for (int r = 0; r < rows; r++) {
      if (spans[r].first == spans[r].end) continue;
      soften(call_.softcap, score_factor(call_) * blocks_.query_steps[r0 + r], blocks_.scores + r * kChunk,
             spans[r].first, spans[r].end, scratch_.chunk_maximum + r0 + r, scratch_.chunk_denominator + r0 + r);
    }
    weigh(spans, all, r0, rows);
  }

  void score(Span all, int r0, int rows) const {
    const int dim = call_.head_dim, group_size = call_.key.group_size, from = all.first / kTile * kTile;
    for (int i = from; i < all.end; i += kTile) {
      for (int g = 0; g < key_groups_; g++) {
        int32_t* dots = next_dots(i / kTile);
        dots_.score(tile_queries(r0), tile_sums(r0) + g * kPlanes * kTile, blocks_.keys + i * dim, g * group_size,
                    (g + 1) * group_size, dim, i > from, dots);
        const Vector scale = load(blocks_.key_scales + g * kChunk + i);
        for (int r = 0; r < rows; r++) {
          float* scores = blocks_.scores + r * kChunk + i;
          const Vector sum = planes_to_float(dots + r * kTile) * scale;
          store(scores, g == 0 ? sum : load(scores) + sum);
        }
      }
    }
  }

  void weigh(const Span* spans, Span all, int r0, int rows) const {
    const int dim = call_.head_dim, padded = call_.padded_dim(), group_size = call_.value.group_size;
    const int from = all.first / kBlock * kBlock, to = (all.end + kBlock - 1) / kBlock * kBlock;
    for (int first = 0; first < dim; first += group_size) {
      const float* scales = blocks_.value_scales + first / group_size * kChunk;
      for (int r = 0; r < rows; r++) {
        blocks_.weight_steps[r] = weights_to_planes(blocks_.scores + r * kChunk, scales, spans[r], from, to,
                                                    blocks_.weights + r * kChunk);
      }
      for (int d = first; d < first + group_size; d += kTile) {
        int32_t* dots = next_dots(d / kTile);
        dots_.weigh(blocks_.weights + from, blocks_.values + from * dim + d * kBlock, (to - from) / kBlock, dim, dots);
        float* sums = scratch_.chunk + static_cast<int64_t>(r0) * padded + d;
        for (int r = 0; r < rows; r++)
          store(sums + r * padded, planes_to_float(dots + r * kTile) * splat(blocks_.weight_steps[r]));
      }
    }
  }

  // Two places in turn: the next sums are made while these are read.
  int32_t* next_dots(int i) const { return blocks_.dots + i % 2 * kPlanes * kTile * kTile; }

  const Call& call_;
  const Item& item_;
  const Scratch& scratch_;
  const IntegerBlocks blocks_;
  const int rows_, key_groups_;
  Dots dots_;
};
