// specexport.cpu::QuantizedLinear for ONNX Runtime.
#include <string>

#include "custom_op.h"
#include "quantized_linear/linear.h"

namespace specexport {
namespace {

template <class Enum>
Enum choice(const Attributes& attributes, const char* name, std::initializer_list<std::pair<const char*, Enum>> values) {
  const std::string found = attributes.text(name, "none");
  for (const auto& [text, value] : values) {
    if (found == text) return value;
  }
  std::string known;
  for (const auto& [text, value] : values) known += (known.empty() ? "" : ", ") + std::string(text);
  fail("attribute %s must be one of %s, is '%s'", name, known.c_str(), found.c_str());
}

struct QuantizedLinear {
  static constexpr const char* kDomain = "specexport.cpu";
  static constexpr const char* kName = "QuantizedLinear";
  static constexpr Port kInputs[] = {
      {"x", ElementType::kFloat},
      {"packed", ElementType::kUInt8},
      {"bias", ElementType::kFloat, kOptional},
      {"norm_weight", ElementType::kFloat, kOptional},
      {"norm_bias", ElementType::kFloat, kOptional},
      {"residual", ElementType::kFloat, kOptional},
  };
  static constexpr Port kOutputs[] = {{"y", ElementType::kFloat}};

  explicit QuantizedLinear(const Attributes& attributes) {
    constexpr int64_t kMost = int64_t{1} << 31;
    LinearConfig& c = config_;
    c.in_features = attributes.integer_in("in_features", 1, kMost);
    c.out_features = attributes.integer_in("out_features", 1, kMost);
    c.bits = static_cast<int>(attributes.integer("bits"));
    c.group_size = static_cast<int>(attributes.integer("group_size", 0));
    c.has_minimum = attributes.integer_in("has_minimum", 0, 1) != 0;
    c.activation_bits = static_cast<int>(attributes.integer("activation_bits", 32));
    c.norm = choice<Norm>(attributes, "norm", {{"none", Norm::kNone}, {"rms", Norm::kRms}, {"layer", Norm::kLayer}});
    c.epsilon = attributes.real("epsilon", 1e-5f);
    c.activation = choice<Activation>(attributes, "activation",
                                      {{"none", Activation::kNone},
                                       {"silu", Activation::kSilu},
                                       {"gelu", Activation::kGelu},
                                       {"gelu_tanh", Activation::kGeluTanh},
                                       {"relu", Activation::kRelu}});
    c.gated = attributes.integer("gated", 0) != 0;
    const long long k = c.in_features, n = c.out_features;
    if (c.bits != 4 && c.bits != 8 && c.bits != 32) fail("attribute bits must be 4, 8 or 32, is %d", c.bits);
    if (c.activation_bits != 8 && c.activation_bits != 16 && c.activation_bits != 32)
      fail("attribute activation_bits must be 8, 16 or 32, is %d", c.activation_bits);
    if (c.bits == 32) {
      if (c.group_size != 0) fail("attribute group_size must be 0 for 32 bits, is %d", c.group_size);
      if (c.quantizes_activations())
        fail("attribute activation_bits must be 32 for weights of 32 bits, is %d", c.activation_bits);
      if (c.has_minimum) fail("attribute has_minimum must be 0 for weights of 32 bits, is 1");
    } else {
      if (c.group_size != 32 && c.group_size != 64 && c.group_size != 128)
        fail("attribute group_size must be 32, 64 or 128, is %d", c.group_size);
      if (k % c.group_size != 0) fail("in_features must be a multiple of group_size %d, is %lld", c.group_size, k);
    }
    const int64_t activation_group = attributes.integer("activation_group_size", kGroup);
    if (c.quantizes_activations() && activation_group != kGroup)
      fail("attribute activation_group_size must be 32, is %lld", static_cast<long long>(activation_group));
    if (c.gated && n % 2 != 0) fail("out_features must be even when gated, is %lld", n);
  }

  void compute(Context& context) const {
    const Input x = context.input(0), packed = context.input(1), bias = context.input(2);
    const Input norm_weight = context.input(3), norm_bias = context.input(4), residual = context.input(5);
    const LinearConfig& c = config_;
    if (x.shape().rank() < 1 || x.shape().last() != c.in_features)
      fail("input x: the last dimension must be %lld, shape is %s", static_cast<long long>(c.in_features),
           x.shape().text().c_str());
    if (packed.shape().count() != c.packed_bytes())
      fail("input packed: %lld bytes expected for %lld outputs and %lld inputs of %d bits, has %lld",
           static_cast<long long>(c.packed_bytes()), static_cast<long long>(c.out_features),
           static_cast<long long>(c.in_features), c.bits, static_cast<long long>(packed.shape().count()));
    bias.expect({c.out_features});
    if (c.norm == Norm::kNone && (norm_weight || norm_bias)) fail("input norm_weight or norm_bias given, but norm is none");
    norm_weight.expect({c.in_features});
    norm_bias.expect({c.in_features});
    Shape shape = x.shape();
    shape[shape.rank() - 1] = c.outputs();
    residual.expect(shape);

    LinearTensors t;
    t.x = x.data<float>();
    t.packed = packed.data<uint8_t>();
    t.bias = bias.data<float>();
    t.norm_weight = norm_weight.data<float>();
    t.norm_bias = norm_bias.data<float>();
    t.residual = residual.data<float>();
    t.y = context.output<float>(0, shape);
    t.rows = x.shape().count() / c.in_features;
    if (t.rows > 0 && t.y != nullptr) run_linear(c, t);
  }

 private:
  LinearConfig config_;
};

SPECEXPORT_REGISTER(QuantizedLinear);

}  // namespace
}  // namespace specexport
