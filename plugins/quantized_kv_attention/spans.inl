// Which positions the rows of an item attend. Included before the chunks' files. Nothing in any of these files calls a
// function or a template of the standard library, whose one shared copy might be compiled for an instruction set that
// the machine lacks.
//
// Bits of a row: its scores are sums over channels in order, one lane a key (or, of integers, exact in any order); the
// softmax of a chunk runs over absolute positions; weighted sums run over keys in order, one lane a channel (or are
// exact); chunks are merged from the first to the last. Tiles only choose how many rows do this side by side.

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
