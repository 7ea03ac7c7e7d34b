// The pool: every index once, exceptions, calls from inside and from many threads, another number of threads.
#include "thread_pool.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "float16.h"

using specexport::num_threads;
using specexport::parallel_for;
using specexport::set_num_threads;

namespace {

void count_every_index(int64_t count) {
  std::vector<std::atomic<int>> seen(count);
  parallel_for(count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) seen[i]++;
  });
  for (int64_t i = 0; i < count; i++) CHECK(seen[i] == 1, "index %d of %d: %d times", int(i), int(count), int(seen[i]));
}

}  // namespace

void test_thread_pool() {
  CHECK(specexport::default_num_threads() >= 1);
  for (int threads : {1, 2, 5, 3}) {
    set_num_threads(threads);
    CHECK(num_threads() == threads);
    for (int64_t count : {0, 1, 2, 3, 7, 64, 1001}) count_every_index(count);

    for (int round = 0; round < 20; round++) {
      std::string message;
      try {
        parallel_for(10, [](int64_t begin, int64_t end) {
          if (begin <= 7 && 7 < end) throw std::runtime_error("seven");
        });
      } catch (const std::runtime_error& e) {
        message = e.what();
      }
      CHECK(message == "seven");
    }
    count_every_index(100);  // and works on after a failure

    std::atomic<int> inner{0};
    parallel_for(8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) parallel_for(5, [&](int64_t b, int64_t e) { inner += int(e - b); });
    });
    CHECK(inner == 40);
  }

  // A thread that is held up holds nobody else's work up: the others take every piece but its own.
  set_num_threads(2);
  std::atomic<int64_t> others{0};
  parallel_for(64, [&](int64_t begin, int64_t end) {
    if (begin > 0) {
      others += end - begin;
      return;
    }
    for (int ms = 0; ms < 2000 && others + end < 64; ms++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(others + end == 64, "%d indices of 64 were left", int(64 - others - end));
  });

  std::vector<std::thread> callers;
  for (int i = 0; i < 4; i++)
    callers.emplace_back([] {
      for (int round = 0; round < 50; round++) count_every_index(37);
    });
  for (std::thread& caller : callers) caller.join();

  // Workers that have gone to sleep wake up again.
  for (int round = 0; round < 3; round++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    count_every_index(50);
  }
  set_num_threads(0);
  CHECK(num_threads() == specexport::default_num_threads());
}

void test_float16() {
  for (uint32_t bits = 0; bits < 65536; bits++) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const int exponent = (half >> 10) & 31, fraction = half & 1023;
    const double sign = half & 0x8000 ? -1 : 1;
    const float found = specexport::half_to_float(half);
    if (exponent == 31) {
      CHECK(fraction != 0 ? std::isnan(found) : std::isinf(found) && (found < 0) == (sign < 0), "bits %x", bits);
    } else {
      const double expected = sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
      CHECK(found == expected && std::signbit(found) == (sign < 0), "bits %x: %g", bits, found);
    }
  }
}
