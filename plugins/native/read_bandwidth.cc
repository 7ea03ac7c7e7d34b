// How fast this machine reads memory with the pool's threads: what a decode step is held against.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu_features.h"
#include "thread_pool.h"

namespace specexport {
namespace {
constexpr int64_t kBytesAhead = 4096;
}
}  // namespace specexport

#define SPECEXPORT_KERNEL_SOURCE "read_bandwidth.inl"
#include "for_each_isa.h"

namespace specexport {
namespace {

constexpr size_t kLargePage = size_t{1} << 21;

using AddLines = int32_t (*)(const uint8_t*, int64_t);

AddLines chosen() {
#if defined(__x86_64__)
  if (isa() >= Isa::kAvx512Vnni) return avx512_vnni::add_lines;
  if (isa() == Isa::kAvx2) return avx2::add_lines;
#endif
  return portable::add_lines;
}

double seconds_of_pass(const uint8_t* data, int64_t lines) {
  using Clock = std::chrono::steady_clock;
  const AddLines add = chosen();
  static std::atomic<int32_t> kept;  // so that no pass can be left out
  const auto start = Clock::now();
  parallel_for(lines, 1024, [&](int64_t begin, int64_t end) {
    kept.fetch_add(add(data + 64 * begin, end - begin), std::memory_order_relaxed);
  });
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Free {
  void operator()(void* pointer) const { std::free(pointer); }
};

}  // namespace
}  // namespace specexport

// Bytes a second of reading a buffer of `bytes` bytes again and again for about `seconds` seconds: the median pass, of
// at least three, the first not counted. `threads` 0 takes the pool's own number. 0 where the buffer cannot be had.
extern "C" __attribute__((visibility("default"))) double specexport_read_bandwidth(int64_t bytes, double seconds,
                                                                                   int threads) {
  using namespace specexport;
  const int64_t lines = std::max<int64_t>(bytes / 64, 1);
  const size_t size = (static_cast<size_t>(lines) * 64 + kLargePage - 1) & ~(kLargePage - 1);
  const std::unique_ptr<uint8_t, Free> buffer(static_cast<uint8_t*>(std::aligned_alloc(kLargePage, size)));
  if (buffer == nullptr) return 0;
  // Large pages where they can be had: this is what the machine can do, not what a page table lets it do.
  madvise(buffer.get(), size, MADV_HUGEPAGE);
  std::memset(buffer.get(), 1, size);
  const int before = num_threads();
  if (threads > 0) set_num_threads(threads);
  seconds_of_pass(buffer.get(), lines);
  std::vector<double> passes;
  double spent = 0;
  while (passes.size() < 3 || spent < seconds) {
    passes.push_back(seconds_of_pass(buffer.get(), lines));
    spent += passes.back();
  }
  if (threads > 0) set_num_threads(before);
  std::nth_element(passes.begin(), passes.begin() + passes.size() / 2, passes.end());
  return static_cast<double>(lines) * 64 / passes[passes.size() / 2];
}
