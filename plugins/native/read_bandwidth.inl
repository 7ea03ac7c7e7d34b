// Adds up `lines` lines of 64 bytes. The lines ahead are fetched as the kernels fetch theirs: without that a core waits
// for its own hardware prefetcher at every page's end, and the figure would be of that.
__attribute__((noinline)) int32_t add_lines(const uint8_t* data, int64_t lines) {
  constexpr int kVectors = 64 / sizeof(I);
  I sums[kVectors] = {};
  for (int64_t line = 0; line < lines; line++) {
    const uint8_t* at = data + 64 * line;
    __builtin_prefetch(at + kBytesAhead);
    for (int i = 0; i < kVectors; i++) {
      I value;
      std::memcpy(&value, at + i * sizeof(I), sizeof value);
      sums[i] += value;
    }
  }
  int32_t sum = 0;
  for (int i = 0; i < kVectors; i++) sum += total(sums[i]);
  return sum;
}
