// float32 to float16 as its bits, without instructions for it.
#pragma once

#include <cstdint>
#include <cstring>

#include "float16.h"

namespace specexport::attention {

// Static, not inline across sources: a copy compiled for a newer instruction set must never serve the portable kernel.
static inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Half to even, as the hardware does.
static inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // From 65520 on.
  if (rest < 0x38800000) {
    // Subnormal: the unit of the last place of a sum with 0.5 is 2^-24, and the addition rounds to it.
    return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

}  // namespace specexport::attention
