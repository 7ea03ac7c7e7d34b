#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace specexport {
namespace {

// Longer than the gap between two nodes of a step, shorter than a caller would notice on its CPU bill.
constexpr auto kSpin = std::chrono::microseconds(100);

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until done() or the time is up; says which.
template <class Done>
bool spin_until(Done&& done) {
  for (int i = 0; i < 32; i++) {
    if (done()) return true;
    relax();
  }
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; i++) {
      if (done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

thread_local bool inside_range = false;

class Pool {
 public:
  ~Pool() { stop(); }

  // The caller holds `owner`.
  void resize(int threads) {
    if (static_cast<int>(workers_.size()) + 1 == threads) return;
    stop();
    stopping_.store(false);
    const uint64_t seen = generation_.load();
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i, seen] { work(i, seen); });
  }

  void run(int64_t count, int ranges, RangeFunction function, void* context) {
    count_ = count;
    ranges_ = ranges;
    function_ = function;
    context_ = context;
    failure_ = nullptr;
    pending_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1);  // Sequentially consistent, as `sleepers_`: one of the two sides sees the other.
    if (sleepers_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    run_range(0);
    auto done = [this] { return pending_.load(std::memory_order_acquire) == 0; };
    if (!spin_until(done)) {
      std::unique_lock<std::mutex> lock(mutex_);
      caller_waits_ = true;
      finished_.wait(lock, done);
      caller_waits_ = false;
    }
    if (failure_) std::rethrow_exception(failure_);
  }

  std::mutex owner;  // Held by the one caller that uses the workers.

 private:
  void run_range(int index) noexcept {
    if (index >= ranges_) return;
    // Ranges differ in length by at most one.
    const int64_t begin = count_ * index / ranges_, end = count_ * (index + 1) / ranges_;
    inside_range = true;
    try {
      function_(context_, begin, end);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
    inside_range = false;
  }

  void work(int index, uint64_t seen) {
    for (;;) {
      auto called = [&] { return generation_.load() != seen; };
      if (!spin_until(called)) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, called);
        sleepers_.fetch_sub(1);
      }
      seen++;
      if (stopping_.load()) return;
      run_range(index);
      if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        // The caller may have gone to sleep; under the lock it either has or will see pending == 0.
        std::lock_guard<std::mutex> lock(mutex_);
        if (caller_waits_) finished_.notify_one();
      }
    }
  }

  void stop() {
    if (workers_.empty()) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> pending_{0}, sleepers_{0};
  std::atomic<bool> stopping_{false};
  bool caller_waits_ = false;
  int64_t count_ = 0;
  int ranges_ = 0;
  RangeFunction function_ = nullptr;
  void* context_ = nullptr;
  std::exception_ptr failure_;
};

std::atomic<int> wanted_threads{0};  // 0: the default.
std::atomic<Pool*> pool{nullptr};

// Workers do not survive fork(): the child starts anew, and leaves the parent's pool untouched (its locks may be held).
void forget_pool() { pool.store(nullptr); }

Pool* shared_pool() {
  Pool* current = pool.load();
  if (current != nullptr) return current;
  static std::once_flag fork_handler;
  std::call_once(fork_handler, [] { pthread_atfork(nullptr, nullptr, forget_pool); });
  Pool* made = new Pool;  // Never deleted: its threads may outlive static destructors, and must not be joined then.
  if (pool.compare_exchange_strong(current, made)) return made;
  delete made;
  return current;
}

bool read_numbers(const std::string& path, const char* format, double* first, double* second) {
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return false;
  const int wanted = second == nullptr ? 1 : 2;
  const int got = second == nullptr ? std::fscanf(file, format, first) : std::fscanf(file, format, first, second);
  std::fclose(file);
  return got == wanted;
}

// CPUs of a cgroup's quota, the smallest on the way to the root; 0 if there is none.
double quota_on_path(const std::string& root, std::string group, bool v2) {
  double smallest = 0;
  for (;;) {
    double quota = 0, period = 0;
    const std::string folder = root + group + (group.empty() || group.back() != '/' ? "/" : "");
    const bool found = v2 ? read_numbers(folder + "cpu.max", "%lf %lf", &quota, &period)
                          : read_numbers(folder + "cpu.cfs_quota_us", "%lf", &quota, nullptr) &&
                                read_numbers(folder + "cpu.cfs_period_us", "%lf", &period, nullptr);
    if (found && quota > 0 && period > 0) smallest = smallest > 0 ? std::min(smallest, quota / period) : quota / period;
    const size_t slash = group.find_last_of('/');
    if (group.empty() || slash == std::string::npos) return smallest;
    group.resize(slash);
  }
}

double cgroup_quota() {
  std::FILE* file = std::fopen("/proc/self/cgroup", "r");
  if (file == nullptr) return 0;
  double smallest = 0;
  auto take = [&](double quota) {
    if (quota > 0) smallest = smallest > 0 ? std::min(smallest, quota) : quota;
  };
  char line[4096];
  while (std::fgets(line, sizeof line, file) != nullptr) {
    line[std::strcspn(line, "\n")] = 0;
    char* controllers = std::strchr(line, ':');
    char* path = controllers == nullptr ? nullptr : std::strchr(controllers + 1, ':');
    if (path == nullptr) continue;
    *path++ = 0;
    const std::string names = std::string(",") + (controllers + 1) + ",";
    if (names == ",,") {
      take(quota_on_path("/sys/fs/cgroup", path, true));
    } else if (names.find(",cpu,") != std::string::npos) {
      // Seen from inside a container the path may name a group of the host's; the mount's root is then our own.
      take(quota_on_path("/sys/fs/cgroup/cpu", path, false));
      take(quota_on_path("/sys/fs/cgroup/cpu,cpuacct", path, false));
    }
  }
  std::fclose(file);
  return smallest;
}

}  // namespace

int default_num_threads() {
  static const int threads = [] {
    int cpus = static_cast<int>(std::thread::hardware_concurrency());
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
    const double quota = cgroup_quota();
    // A quota of 1.5 CPUs feeds two threads better than one; spinning is bounded.
    if (quota > 0) cpus = std::min(cpus, static_cast<int>(quota + 0.75));
    return std::max(cpus, 1);
  }();
  return threads;
}

int num_threads() {
  const int wanted = wanted_threads.load();
  return wanted > 0 ? wanted : default_num_threads();
}

void set_num_threads(int threads) { wanted_threads.store(std::min(std::max(threads, 0), 1024)); }

void parallel_ranges(int64_t count, int64_t grain, RangeFunction function, void* context) {
  if (count <= 0) return;
  const int threads = num_threads();
  const int64_t most = std::max<int64_t>(count / std::max<int64_t>(grain, 1), 1);
  const int ranges = static_cast<int>(std::min<int64_t>(threads, most));
  if (ranges == 1 || inside_range) return function(context, 0, count);
  Pool* workers = shared_pool();
  std::unique_lock<std::mutex> lock(workers->owner, std::try_to_lock);
  if (!lock.owns_lock()) return function(context, 0, count);
  workers->resize(threads);
  workers->run(count, ranges, function, context);
}

}  // namespace specexport
