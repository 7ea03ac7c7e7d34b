// One row out of a packed matrix.
#pragma once

#include <cstdint>
#include <cstring>

#include "float16.h"
#include "quantized_linear/linear.h"

namespace specexport {

// Row `id` of the matrix as float32: one lane of a tile.
inline void read_packed_row(const LinearConfig& config, const uint8_t* packed, int64_t id, float* y) {
  const uint8_t* tile = packed + id / kTile * config.tile_bytes();
  const int lane = static_cast<int>(id % kTile);
  if (config.bits == 32) {
    for (int64_t k = 0; k < config.in_features; k++) std::memcpy(y + k, tile + (k * kTile + lane) * 4, sizeof(float));
    return;
  }
  auto half_at = [&](const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, sizeof half);
    return half_to_float(half);
  };
  const int64_t groups = config.groups();
  const int groups_per_line = config.has_minimum ? 1 : 2;
  const float zero = config.bits == 8 ? 128.0f : config.has_minimum ? 0.0f : 8.0f;
  for (int64_t group = 0; group < groups;) {
    const uint8_t* line = tile;
    tile += 64;
    for (int g = 0; g < groups_per_line && group < groups; g++, group++) {
      const float scale = half_at(line + 32 * g + 2 * lane);
      const float minimum = config.has_minimum ? half_at(line + 32 + 2 * lane) : 0.0f;
      auto value = [&](int q) {
        const float v = (static_cast<float>(q) - zero) * scale;
        return config.has_minimum ? v + minimum : v;
      };
      for (int i = 0; i < config.group_size; i += config.bits == 4 ? 8 : 4, tile += 64) {
        const uint8_t* q = tile + lane * 4;
        for (int j = 0; j < 4; j++) {
          y[j] = value(config.bits == 4 ? q[j] & 15 : q[j]);
          if (config.bits == 4) y[4 + j] = value(q[j] >> 4);
        }
        y += config.bits == 4 ? 8 : 4;
      }
    }
  }
}

}  // namespace specexport
