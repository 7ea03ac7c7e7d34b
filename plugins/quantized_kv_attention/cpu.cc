// QuantizedKVAttention on the CPU: the op that ONNX Runtime sees, its checks, and its four cache types.
#include "custom_op.h"
#include "quantized_kv_attention/schedule.h"
#include "quantized_kv_attention/steps.h"

namespace specexport::attention {
namespace {

long long number(int64_t value) { return static_cast<long long>(value); }

// A key or value cache as it comes in.
struct CacheInput {
  const char* name;
  int bits, group_size;
  Input rows, scales;

  void check(int64_t batch, int64_t heads) const {
    const Shape& shape = rows.shape();
    if (shape.rank() != 4 || shape[0] != batch || shape[1] != heads)
      fail("input %s_cache: shape [%lld, %lld, C, D] expected, is %s", name, number(batch), number(heads),
           shape.text().c_str());
    if (bits == 8) {
      if (!scales) fail("input %s_scale is missing; a cache of 8 bits has one", name);
      if (shape[3] % group_size != 0)
        fail("attribute %s_group_size: %d does not divide head_dim %lld", name, group_size, number(shape[3]));
      scales.expect({batch, heads, shape[2], shape[3] / group_size});
    } else if (scales) {
      fail("input %s_scale: a cache of 16 bits has none; leave it out", name);
    }
  }
};

template <int KeyBits, int ValueBits>
class QuantizedKVAttention {
 public:
  static constexpr const char* kDomain = "specexport";
  static constexpr const char* kName = "QuantizedKVAttention";
  static constexpr ElementType kKeyType = KeyBits == 8 ? ElementType::kInt8 : ElementType::kFloat16;
  static constexpr ElementType kValueType = ValueBits == 8 ? ElementType::kInt8 : ElementType::kFloat16;
  static constexpr Port kInputs[] = {
      {"qkv", ElementType::kFloat},
      {"key_cache", kKeyType},
      {"key_scale", ElementType::kFloat16, kOptional},
      {"value_cache", kValueType},
      {"value_scale", ElementType::kFloat16, kOptional},
      {"past_length", ElementType::kInt64},
      {"query_length", ElementType::kInt64},
      {"cos", ElementType::kFloat, kOptional},
      {"sin", ElementType::kFloat, kOptional},
      {"q_norm_weight", ElementType::kFloat, kOptional},
      {"k_norm_weight", ElementType::kFloat, kOptional},
      {"sinks", ElementType::kFloat, kOptional},
  };
  static constexpr Port kOutputs[] = {
      {"y", ElementType::kFloat},
      {"key_cache_out", kKeyType},
      {"key_scale_out", ElementType::kFloat16, kOptional},
      {"value_cache_out", kValueType},
      {"value_scale_out", ElementType::kFloat16, kOptional},
  };

  explicit QuantizedKVAttention(const Attributes& a) {
    common_.q_heads = static_cast<int>(a.integer_in("q_num_heads", 1, 1 << 16));
    common_.kv_heads = static_cast<int>(a.integer_in("kv_num_heads", 1, 1 << 16));
    if (common_.q_heads % common_.kv_heads != 0)
      fail("attribute q_num_heads must be a multiple of kv_num_heads, is %d of %d", common_.q_heads, common_.kv_heads);
    common_.repeats = common_.q_heads / common_.kv_heads;
    common_.scale = a.real("scale");
    common_.softcap = a.real("softcap", 0.0f);
    if (!(common_.softcap >= 0)) fail("attribute softcap must not be negative, is %g", common_.softcap);
    common_.window = a.integer("window", 0);
    if (common_.window < 0) fail("attribute window must not be negative, is %lld", number(common_.window));
    common_.interleaved = a.integer("rotary_interleaved", 0) != 0;
    common_.epsilon = a.real("norm_epsilon", 1e-6f);
    check_bits(a, "key_bits", KeyBits);
    check_bits(a, "value_bits", ValueBits);
    if (KeyBits == 8) common_.key.group_size = group_size(a, "key_group_size");
    if (ValueBits == 8) common_.value.group_size = group_size(a, "value_group_size");
    common_.key.bits = KeyBits;
    common_.value.bits = ValueBits;
  }

  void compute(Context& c) const {
    const Input qkv = c.input(0), past = c.input(5), query = c.input(6);
    const CacheInput key{"key", KeyBits, common_.key.group_size, c.input(1), c.input(2)};
    const CacheInput value{"value", ValueBits, common_.value.group_size, c.input(3), c.input(4)};
    Call call = common_;
    check_shapes(qkv, key, value, call);
    past.expect({call.batch});
    query.expect({call.batch});
    call.qkv = qkv.data<float>();
    call.past = past.data<int64_t>();
    call.query = query.data<int64_t>();
    optional_inputs(c, call);

    call.y = c.output<float>(0, {call.batch, call.rows, static_cast<int64_t>(call.q_heads) * call.head_dim});
    call.key = bind<KeyBits>(c, 1, key, common_.key);
    call.value = bind<ValueBits>(c, 3, value, common_.value);
    if (call.batch * call.rows == 0) return;
    static thread_local Workspace memory;
    run(call, steps(isa(), call), memory);
  }

 private:
  static void check_bits(const Attributes& a, const char* name, int bits) {
    const int64_t said = a.integer(name, bits);
    if (said != bits)
      fail("attribute %s is %lld, but the cache's element type holds %d bits", name, number(said), bits);
  }

  static int group_size(const Attributes& a, const char* name) {
    const int64_t size = a.integer_in(name, 8, kMaxHeadDim);
    if (size % 8 != 0) fail("attribute %s must be a multiple of 8, is %lld", name, number(size));
    return static_cast<int>(size);
  }

  static void check_shapes(const Input& qkv, const CacheInput& key, const CacheInput& value, Call& call) {
    if (qkv.shape().rank() != 3)
      fail("input qkv: shape [B, S, (Hq + 2 Hkv) D] expected, is %s", qkv.shape().text().c_str());
    call.batch = qkv.shape()[0];
    call.rows = qkv.shape()[1];
    key.check(call.batch, call.kv_heads);
    value.check(call.batch, call.kv_heads);
    if (key.rows.shape() != value.rows.shape())
      fail("input value_cache: the key cache's shape %s expected, is %s", key.rows.shape().text().c_str(),
           value.rows.shape().text().c_str());
    call.capacity = key.rows.shape()[2];
    const int64_t dim = key.rows.shape()[3];
    if (dim < 8 || dim % 8 != 0 || dim > kMaxHeadDim)
      fail("input key_cache: head_dim must be a multiple of 8 up to %d, is %lld", kMaxHeadDim, number(dim));
    call.head_dim = static_cast<int>(dim);
    qkv.expect({call.batch, call.rows, (call.q_heads + int64_t{2} * call.kv_heads) * dim});
  }

  static void optional_inputs(const Context& c, Call& call) {
    const Input cos = c.input(7), sin = c.input(8), q_norm = c.input(9), k_norm = c.input(10), sinks = c.input(11);
    if (static_cast<bool>(cos) != static_cast<bool>(sin)) fail("inputs cos and sin: both or neither expected");
    int64_t positions = call.capacity;
    if (cos) {
      if (cos.shape().rank() != 2 || 2 * cos.shape()[1] > call.head_dim)
        fail("input cos: shape [P, R / 2] with R at most head_dim %d expected, is %s", call.head_dim,
             cos.shape().text().c_str());
      sin.expect(cos.shape());
      positions = cos.shape()[0];
      call.rotary_half = static_cast<int>(cos.shape()[1]);
      call.cos = cos.data<float>();
      call.sin = sin.data<float>();
    }
    q_norm.expect({call.head_dim});
    k_norm.expect({call.head_dim});
    sinks.expect({call.q_heads});
    call.q_norm = q_norm.data<float>();
    call.k_norm = k_norm.data<float>();
    call.sinks = sinks.data<float>();
    for (int64_t b = 0; b < call.batch; b++) check_lengths(call, b, positions);
  }

  static void check_lengths(const Call& call, int64_t b, int64_t positions) {
    const int64_t past = call.past[b], query = call.query[b];
    if (past < 0 || query < 0)
      fail("past_length[%lld] and query_length[%lld] must not be negative, are %lld and %lld", number(b), number(b),
           number(past), number(query));
    if (query > call.rows)
      fail("query_length[%lld] is %lld, but qkv has %lld rows", number(b), number(query), number(call.rows));
    if (past > call.capacity - query)
      fail("sequence %lld: past_length %lld and query_length %lld exceed the cache's capacity of %lld rows; grow it",
           number(b), number(past), number(query), number(call.capacity));
    if (query > 0 && past > positions - query)
      fail("sequence %lld: position %lld is past the end of the RoPE tables cos and sin of %lld rows", number(b),
           number(past + query - 1), number(positions));
  }

  // The cache's output: the input's own memory, or a copy of it.
  template <int Bits>
  static CacheSide bind(Context& c, size_t index, const CacheInput& in, CacheSide side) {
    using Element = std::conditional_t<Bits == 8, int8_t, uint16_t>;
    Element* rows = c.output<Element>(index, in.rows.shape());
    copy_bytes(rows, in.rows.data<Element>(), in.rows.shape().count() * static_cast<int64_t>(sizeof(Element)));
    side.rows = rows;
    if (Bits == 8) {
      side.scales = c.output<uint16_t>(index + 1, in.scales.shape());
      if (side.scales == nullptr && in.scales.shape().count() > 0)
        fail("output %s_scale_out is missing; a cache of 8 bits has one", in.name);
      copy_bytes(side.scales, in.scales.data<uint16_t>(), in.scales.shape().count() * 2);
    }
    return side;
  }

  Call common_;
};

using Attention88 = QuantizedKVAttention<8, 8>;
using Attention816 = QuantizedKVAttention<8, 16>;
using Attention168 = QuantizedKVAttention<16, 8>;
using Attention1616 = QuantizedKVAttention<16, 16>;
SPECEXPORT_REGISTER(Attention88);
SPECEXPORT_REGISTER(Attention816);
SPECEXPORT_REGISTER(Attention168);
SPECEXPORT_REGISTER(Attention1616);

}  // namespace
}  // namespace specexport::attention
