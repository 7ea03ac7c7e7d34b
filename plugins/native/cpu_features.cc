#include "cpu_features.h"

#include <atomic>
#include <cstring>

namespace specexport {
namespace {

Isa best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx2 && avx512) return Isa::kAvx512Vnni;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kPortable;
}

std::atomic<int> chosen{-1};  // -1: automatic.

}  // namespace

Isa isa() {
  static const Isa automatic = best();
  const int value = chosen.load(std::memory_order_relaxed);
  return value < 0 ? automatic : static_cast<Isa>(value);
}

bool set_isa(const char* name) {
  if (name == nullptr) return false;
  if (std::strcmp(name, "auto") == 0) {
    chosen.store(-1);
    return true;
  }
  const Isa top = best();
  for (Isa candidate : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512Vnni}) {
    if (candidate <= top && std::strcmp(name, isa_name(candidate)) == 0) {
      chosen.store(static_cast<int>(candidate));
      return true;
    }
  }
  return false;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512Vnni:
      return "avx512_vnni";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "portable";
  }
}

}  // namespace specexport
