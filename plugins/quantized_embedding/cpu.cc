// specexport.cpu::QuantizedEmbedding: rows out of a packed matrix, the very tensor of a tied output head.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "custom_op.h"
#include "float16.h"
#include "quantized_linear/linear.h"
#include "thread_pool.h"

namespace specexport {
namespace {

// Row `id` of the matrix as float32: one lane of a tile.
void read_row(const LinearConfig& config, const uint8_t* packed, int64_t id, float* y) {
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
  const int64_t groups = config.in_features / config.group_size;
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

struct QuantizedEmbedding {
  static constexpr const char* kDomain = "specexport.cpu";
  static constexpr const char* kName = "QuantizedEmbedding";
  static constexpr Port kInputs[] = {{"input_ids", ElementType::kInt64}, {"packed", ElementType::kUInt8}};
  static constexpr Port kOutputs[] = {{"y", ElementType::kFloat}};

  explicit QuantizedEmbedding(const Attributes& attributes) {
    constexpr int64_t kMost = int64_t{1} << 31;
    LinearConfig& c = config_;
    c.in_features = attributes.integer_in("in_features", 1, kMost);
    c.out_features = attributes.integer_in("out_features", 1, kMost);
    c.bits = static_cast<int>(attributes.integer("bits"));
    c.group_size = static_cast<int>(attributes.integer("group_size", 0));
    c.has_minimum = attributes.integer_in("has_minimum", 0, 1) != 0;
    if (c.bits != 4 && c.bits != 8 && c.bits != 32) fail("attribute bits must be 4, 8 or 32, is %d", c.bits);
    if (c.bits == 32 ? c.group_size != 0 : c.group_size != 32 && c.group_size != 64 && c.group_size != 128)
      fail("attribute group_size must be 32, 64 or 128 (0 for 32 bits), is %d", c.group_size);
    if (c.bits == 32 && c.has_minimum) fail("attribute has_minimum must be 0 for weights of 32 bits, is 1");
    if (c.bits != 32 && c.in_features % c.group_size != 0)
      fail("in_features must be a multiple of group_size %d, is %lld", c.group_size,
           static_cast<long long>(c.in_features));
  }

  void compute(Context& context) const {
    const Input ids = context.input(0), packed = context.input(1);
    const LinearConfig& c = config_;
    if (packed.shape().count() != c.packed_bytes())
      fail("input packed: %lld bytes expected for %lld rows of %lld features of %d bits, has %lld",
           static_cast<long long>(c.packed_bytes()), static_cast<long long>(c.out_features),
           static_cast<long long>(c.in_features), c.bits, static_cast<long long>(packed.shape().count()));
    const int64_t count = ids.shape().count();
    const int64_t* id = ids.data<int64_t>();
    for (int64_t i = 0; i < count; i++) {
      if (id[i] < 0 || id[i] >= c.out_features)
        fail("input input_ids: id %lld at position %lld is outside the vocabulary, 0 to %lld",
             static_cast<long long>(id[i]), static_cast<long long>(i), static_cast<long long>(c.out_features - 1));
    }
    if (ids.shape().rank() + 1 > Shape::kMaxRank) fail("input input_ids has too many dimensions");
    float* y = context.output<float>(0, ids.shape().with(c.in_features));
    const uint8_t* matrix = packed.data<uint8_t>();
    parallel_for(count, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) read_row(c, matrix, id[i], y + i * c.in_features);
    });
  }

 private:
  LinearConfig config_;
};

SPECEXPORT_REGISTER(QuantizedEmbedding);

}  // namespace
}  // namespace specexport
