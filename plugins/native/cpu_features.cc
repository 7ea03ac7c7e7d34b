#include "cpu_features.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specexport {
namespace {

// Whether the processor has int8 tiles and the system lets this process use them (it must be asked: they enlarge what
// it saves of a thread).
bool tiles_granted() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;  // Leaf 7, EDX.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTile) == 0 || (d & kInt8) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Isa best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx2 && avx512) return tiles_granted() ? Isa::kAmx : Isa::kAvx512Vnni;
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
  for (Isa candidate : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512Vnni, Isa::kAmx}) {
    if (candidate <= top && std::strcmp(name, isa_name(candidate)) == 0) {
      chosen.store(static_cast<int>(candidate));
      return true;
    }
  }
  return false;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAmx:
      return "amx";
    case Isa::kAvx512Vnni:
      return "avx512_vnni";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "portable";
  }
}

}  // namespace specexport
