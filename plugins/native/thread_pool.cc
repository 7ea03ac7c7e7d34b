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
#include <utility>
#include <vector>

namespace specexport {
namespace {

// Longer than the gap between two nodes of a step, shorter than a caller would notice on its CPU bill.
constexpr auto kSpin = std::chrono::microseconds(100);

// The finest that a job is cut for a thread; the first pieces are taken many at a time.
constexpr int kPiecesPerThread = 32;

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

// Threads take pieces of a job as they come, larger ones first: a worker that the system runs late (another process has
// its CPU) then delays nobody, for the others have taken its share.
//
// `ticket_` is the job's number, and the next piece to be taken. A thread reads the job and claims pieces by one
// compare-and-swap of the ticket that it read before; that fails if the job has ended in between, so no thread ever runs
// one job's function on another one's pieces, however late it comes.
class Pool {
 public:
  ~Pool() { stop(); }

  // The caller holds `owner`.
  void resize(int threads) {
    if (static_cast<int>(workers_.size()) + 1 == threads) return;
    stop();
    stopping_.store(false);
    const uint32_t seen = job_of(ticket_.load());
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, seen] { work(seen); });
  }

  // The caller holds `owner`. Of `count` indices, `pieces` are handed out.
  void run(int64_t count, uint32_t pieces, RangeFunction function, void* context) {
    const uint32_t job = job_of(ticket_.load()) + 1;
    // The old ticket is closed (see below) before the first field changes: whoever reads a new field fails to claim.
    count_.store(count, std::memory_order_release);
    pieces_.store(pieces, std::memory_order_release);
    function_.store(function, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    failure_ = nullptr;
    unfinished_.store(pieces, std::memory_order_relaxed);
    ticket_.store(ticket(job, 0));  // Sequentially consistent, as `sleepers_`: one of the two sides sees the other.
    if (sleepers_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    take_part(job);
    auto done = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
    if (!spin_until(done)) {
      std::unique_lock<std::mutex> lock(mutex_);
      caller_waits_ = true;
      finished_.wait(lock, done);
      caller_waits_ = false;
    }
    ticket_.store(ticket(job, kClosed));
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  std::mutex owner;  // Held by the one caller that uses the workers.

 private:
  static constexpr uint32_t kClosed = UINT32_MAX;
  static uint64_t ticket(uint32_t job, uint32_t piece) { return static_cast<uint64_t>(job) << 32 | piece; }
  static uint32_t job_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }

  // Runs pieces of `job` until none is left.
  void take_part(uint32_t job) {
    const uint32_t threads = static_cast<uint32_t>(workers_.size()) + 1;
    uint64_t current = ticket_.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t piece = static_cast<uint32_t>(current), pieces = pieces_.load(std::memory_order_acquire);
      const RangeFunction function = function_.load(std::memory_order_acquire);
      void* context = context_.load(std::memory_order_acquire);
      const int64_t count = count_.load(std::memory_order_acquire);
      if (job_of(current) != job || piece >= pieces) return;
      const uint32_t taken = std::max<uint32_t>(1, (pieces - piece) / (2 * threads));
      if (!ticket_.compare_exchange_weak(current, current + taken, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      run_range(function, context, count * piece / pieces, count * (piece + taken) / pieces);
      if (unfinished_.fetch_sub(taken, std::memory_order_acq_rel) == taken) {
        // The caller may have gone to sleep; under the lock it either has or will see that all is done.
        std::lock_guard<std::mutex> lock(mutex_);
        if (caller_waits_) finished_.notify_one();
        return;
      }
      current = ticket_.load(std::memory_order_acquire);
    }
  }

  void run_range(RangeFunction function, void* context, int64_t begin, int64_t end) noexcept {
    inside_range = true;
    try {
      function(context, begin, end);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
    inside_range = false;
  }

  void work(uint32_t seen) {
    for (;;) {
      auto called = [&] { return job_of(ticket_.load()) != seen; };
      if (!spin_until(called)) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, called);
        sleepers_.fetch_sub(1);
      }
      seen = job_of(ticket_.load());
      if (stopping_.load()) return;
      take_part(seen);
    }
  }

  void stop() {
    if (workers_.empty()) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
      ticket_.store(ticket(job_of(ticket_.load()) + 1, kClosed));
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::atomic<uint64_t> ticket_{kClosed};
  std::atomic<uint32_t> pieces_{0}, unfinished_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> count_{0};
  std::atomic<RangeFunction> function_{nullptr};
  std::atomic<void*> context_{nullptr};
  bool caller_waits_ = false;
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
  const uint32_t pieces = static_cast<uint32_t>(std::min<int64_t>(int64_t{threads} * kPiecesPerThread, most));
  if (threads == 1 || pieces == 1 || inside_range) return function(context, 0, count);
  Pool* workers = shared_pool();
  std::unique_lock<std::mutex> lock(workers->owner, std::try_to_lock);
  if (!lock.owns_lock()) return function(context, 0, count);
  workers->resize(threads);
  workers->run(count, pieces, function, context);
}

}  // namespace specexport
