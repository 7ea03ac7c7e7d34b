// The library's own worker threads.
//
//   parallel_for(count, [&](int64_t begin, int64_t end) { ... });
//
// hands out contiguous ranges of [0, count) to the caller and the workers, as they come, and returns when all are done.
// A thread gets a few ranges, which differ from call to call: kernels must give the same bits for every split.
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

// Runs body(begin, end) over [0, count); no range is smaller than `grain`, unless `count` is.
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
