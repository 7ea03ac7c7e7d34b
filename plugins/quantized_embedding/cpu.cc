// specexport.cpu::QuantizedEmbedding: rows out of a packed matrix, the very tensor of a tied output head.
#include "custom_op.h"
#include "quantized_embedding/read_row.h"
#include "thread_pool.h"

namespace specexport {
namespace {

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
      for (int64_t i = begin; i < end; i++) read_packed_row(c, matrix, id[i], y + i * c.in_features);
    });
  }

 private:
  LinearConfig config_;
};

SPECEXPORT_REGISTER(QuantizedEmbedding);

}  // namespace
}  // namespace specexport
