// The library's own worker threads.
//
//   parallel_for(count, [&](int64_t begin, int64_t end) { ... });
//
// splits [0, count) into one contiguous range a thread, the caller's included, and returns when all are done. The split
// depends on `count` and the thread count only. Kernels must give the same bits for every split.
//
// An exception in a range is rethrown in the caller. A call from inside a range, or while another thread's call holds
// the workers, runs in the caller alone: never a deadlock, never a queue.
#pragma once

#include <cstdint>
#include <type_traits>

namespace specexport {

// Threads that parallel_for uses, the caller included.
int num_threads();

// Sets them; 0 or less means the default: the smaller of the process's CPU affinity and its cgroup's CPU quota.
void set_num_threads(int threads);

// CPUs that this process may really use.
int default_num_threads();

using RangeFunction = void (*)(void* context, int64_t begin, int64_t end);
void parallel_ranges(int64_t count, int64_t grain, RangeFunction function, void* context);

// Runs body(begin, end) over [0, count); no range but the last is smaller than `grain`.
template <class Body>
void parallel_for(int64_t count, int64_t grain, Body&& body) {
  using Type = std::remove_reference_t<Body>;
  parallel_ranges(
      count, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<Type*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

template <class Body>
void parallel_for(int64_t count, Body&& body) {
  parallel_for(count, 1, body);
}

}  // namespace specexport
