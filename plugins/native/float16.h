// float16 as its 16 bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace specexport {

// Exact, for every value; a NaN stays one.
inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  float result;
  if (magnitude < 0x0400) {  // Zero or subnormal: a multiple of 2^-24.
    result = static_cast<float>(magnitude) * 0x1p-24f;
    uint32_t bits;
    std::memcpy(&bits, &result, sizeof bits);
    bits |= sign;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }
  const uint32_t exponent = magnitude >= 0x7c00 ? 0x70000000u : 0x38000000u;  // Infinity and NaN; or the bias, 112.
  const uint32_t bits = sign | ((magnitude << 13) + exponent);
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

}  // namespace specexport
