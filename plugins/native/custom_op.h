// How a kernel is written.
//
// A kernel is a class with a name, its ports, a constructor that reads attributes, and compute():
//
//   struct Scale {
//     static constexpr const char* kDomain = "specexport";
//     static constexpr const char* kName = "Scale";
//     static constexpr Port kInputs[] = {{"x", ElementType::kFloat}, {"bias", ElementType::kFloat, kOptional}};
//     static constexpr Port kOutputs[] = {{"y", ElementType::kFloat}};
//     explicit Scale(const Attributes& a) : factor_(a.real("factor", 1.0f)) {}
//     void compute(Context& c) { Input x = c.input(0); float* y = c.output<float>(0, x.shape()); ... }
//   };
//   SPECEXPORT_REGISTER(Scale);            // in the .cc file, at namespace scope; no list to edit
//
// Constructor and compute() report bad input by throwing Error("what, where, found, what to do"): the constructor's
// error fails the session's creation, compute()'s fails the run. No exception crosses into ONNX Runtime.
//
// An input whose element type varies (a cache of int8 or float16) needs one class, or one instance of a class template,
// a combination: register each under the same name; ONNX Runtime picks by the node's types.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "ort_api.h"

namespace specexport {

using ort::ElementType;

constexpr bool kOptional = true;

struct Port {
  const char* name;
  ElementType type;
  bool optional = false;
};

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}
};

// An Error from a printf format.
[[noreturn]] inline void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Error(text);
}

// At most eight dimensions, without an allocation.
class Shape {
 public:
  static constexpr size_t kMaxRank = 8;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) : rank_(dims.size()) {
    size_t i = 0;
    for (int64_t d : dims) dims_[i++] = d;
  }

  size_t rank() const { return rank_; }
  int64_t operator[](size_t i) const { return dims_[i]; }
  int64_t& operator[](size_t i) { return dims_[i]; }
  const int64_t* data() const { return dims_; }
  int64_t last() const { return rank_ ? dims_[rank_ - 1] : 1; }
  int64_t count() const {
    int64_t n = 1;
    for (size_t i = 0; i < rank_; i++) n *= dims_[i];
    return n;
  }
  // This shape and one further, last dimension.
  Shape with(int64_t last) const {
    Shape longer = *this;
    longer.dims_[longer.rank_++] = last;
    return longer;
  }
  bool operator==(const Shape& other) const {
    return rank_ == other.rank_ && std::memcmp(dims_, other.dims_, rank_ * sizeof dims_[0]) == 0;
  }
  bool operator!=(const Shape& other) const { return !(*this == other); }
  std::string text() const {
    std::string s = "[";
    for (size_t i = 0; i < rank_; i++) s += (i ? ", " : "") + std::to_string(dims_[i]);
    return s + "]";
  }

 private:
  friend class Context;
  int64_t dims_[kMaxRank] = {};
  size_t rank_ = 0;
};

template <class T>
struct ElementOf;
template <>
struct ElementOf<float> : std::integral_constant<ElementType, ElementType::kFloat> {};
template <>
struct ElementOf<uint8_t> : std::integral_constant<ElementType, ElementType::kUInt8> {};
template <>
struct ElementOf<int8_t> : std::integral_constant<ElementType, ElementType::kInt8> {};
template <>
struct ElementOf<int32_t> : std::integral_constant<ElementType, ElementType::kInt32> {};
template <>
struct ElementOf<int64_t> : std::integral_constant<ElementType, ElementType::kInt64> {};
template <>
struct ElementOf<uint16_t> : std::integral_constant<ElementType, ElementType::kFloat16> {};  // float16 as its bits

// One input tensor, or an absent optional one.
class Input {
 public:
  Input() = default;
  Input(const char* name, const void* data, ElementType type, const Shape& shape)
      : name_(name), data_(data), type_(type), shape_(shape), present_(true) {}

  explicit operator bool() const { return present_; }
  const char* name() const { return name_; }
  const Shape& shape() const { return shape_; }
  ElementType type() const { return type_; }

  // The elements; null if the input is absent (or empty). float16 is read as uint16_t.
  template <class T>
  const T* data() const {
    if (present_ && type_ != ElementOf<T>::value)
      fail("input %s: element type %d expected, is %d", name_, static_cast<int>(ElementOf<T>::value), static_cast<int>(type_));
    return static_cast<const T*>(data_);
  }

  // Throws unless the shape is `expected`; absent inputs pass.
  void expect(const Shape& expected) const {
    if (present_ && shape_ != expected)
      fail("input %s: shape %s expected, is %s", name_, expected.text().c_str(), shape_.text().c_str());
  }

 private:
  const char* name_ = "";
  const void* data_ = nullptr;
  ElementType type_ = ElementType::kUndefined;
  Shape shape_;
  bool present_ = false;
};

// Throws an Error of the runtime's own message (without its text, which needs no further entry of the table).
inline void check(const ort::Api* api, ort::Status* status, const char* what) {
  if (status == nullptr) return;
  api->release(status);
  fail("ONNX Runtime refused: %s", what);
}

// A node's attributes, while its kernel is made.
class Attributes {
 public:
  Attributes(const ort::Api* api, const ort::KernelInfo* info) : api_(api), info_(info) {}

  int64_t integer(const char* name) const {
    int64_t value = 0;
    if (!read(api_->attribute(info_, name, &value))) fail("attribute %s (integer) is missing", name);
    return value;
  }
  int64_t integer(const char* name, int64_t absent) const {
    int64_t value = 0;
    return read(api_->attribute(info_, name, &value)) ? value : absent;
  }
  // An integer that must lie in [low, high].
  int64_t integer_in(const char* name, int64_t low, int64_t high) const {
    const int64_t value = integer(name);
    if (value < low || value > high)
      fail("attribute %s must be %lld to %lld, is %lld", name, static_cast<long long>(low), static_cast<long long>(high),
           static_cast<long long>(value));
    return value;
  }
  float real(const char* name) const {
    float value = 0;
    if (!read(api_->attribute(info_, name, &value))) fail("attribute %s (float) is missing", name);
    return value;
  }
  float real(const char* name, float absent) const {
    float value = 0;
    return read(api_->attribute(info_, name, &value)) ? value : absent;
  }
  std::string text(const char* name, const char* absent) const {
    char value[64] = {};
    size_t size = sizeof value;
    return read(api_->attribute(info_, name, value, &size)) ? std::string(value) : std::string(absent);
  }

 private:
  bool read(ort::Status* status) const {
    if (status == nullptr) return true;
    api_->release(status);
    return false;
  }
  const ort::Api* api_;
  const ort::KernelInfo* info_;
};

// The tensors of one call.
class Context {
 public:
  Context(const ort::Api* api, ort::KernelContext* context, const Port* inputs, const Port* outputs)
      : api_(api), context_(context), inputs_(inputs), outputs_(outputs) {
    check(api_, api_->input_count(context_, &input_count_), "input count");
    check(api_, api_->output_count(context_, &output_count_), "output count");
  }

  // Input `index`; absent if the node leaves it out.
  Input input(size_t index) const {
    if (index >= input_count_) return {};
    const ort::Value* value = nullptr;
    check(api_, api_->input(context_, index, &value), inputs_[index].name);
    if (value == nullptr) return {};
    ort::TensorInfo* info = nullptr;
    check(api_, api_->type_and_shape(value, &info), inputs_[index].name);
    int type = 0;
    Shape shape;
    ort::Status* status = api_->element_type(info, &type);
    if (status == nullptr) status = api_->rank(info, &shape.rank_);
    const bool too_deep = shape.rank_ > Shape::kMaxRank;
    if (status == nullptr && !too_deep) status = api_->dimensions(info, shape.dims_, shape.rank_);
    api_->release(info);
    check(api_, status, inputs_[index].name);
    if (too_deep) fail("input %s has more than %zu dimensions", inputs_[index].name, Shape::kMaxRank);
    void* data = nullptr;
    check(api_, api_->mutable_data(value, &data), inputs_[index].name);
    return Input(inputs_[index].name, data, static_cast<ElementType>(type), shape);
  }

  // Output `index`, allocated (or, through io binding, the caller's buffer: it may then be an input's own memory).
  // Null if the node does not ask for it.
  template <class T>
  T* output(size_t index, const Shape& shape) {
    if (index >= output_count_) return nullptr;
    if (outputs_[index].type != ElementOf<T>::value) fail("output %s has another element type", outputs_[index].name);
    ort::Value* value = nullptr;
    check(api_, api_->output(context_, index, shape.data(), shape.rank(), &value), outputs_[index].name);
    if (value == nullptr) return nullptr;
    void* data = nullptr;
    check(api_, api_->mutable_data(value, &data), outputs_[index].name);
    return static_cast<T*>(data);
  }

 private:
  const ort::Api* api_;
  ort::KernelContext* context_;
  const Port* inputs_;
  const Port* outputs_;
  size_t input_count_ = 0;
  size_t output_count_ = 0;
};

// One op that RegisterCustomOps offers; they form a list, built before main() or at dlopen.
struct Registration {
  Registration(const char* domain_name, const ort::OpTable* op_table) : domain(domain_name), op(op_table), next(first()) {
    first() = this;
  }
  static Registration*& first() {
    static Registration* head = nullptr;
    return head;
  }
  const char* domain;
  const ort::OpTable* op;
  Registration* next;
};

// Turns a kernel class into ONNX Runtime's table of callbacks.
template <class Kernel>
class CustomOp {
 public:
  static const ort::OpTable* table() {
    static const ort::OpTable op = make();
    return &op;
  }

 private:
  struct Instance {
    Instance(const ort::Api* table, const ort::KernelInfo* info) : api(table), kernel(Attributes(table, info)) {}
    const ort::Api* api;
    Kernel kernel;
  };

  template <class Body>
  static ort::Status* guarded(const ort::Api* api, Body&& body) noexcept {
    try {
      body();
      return nullptr;
    } catch (const Error& e) {
      return status(api, ort::ErrorCode::kInvalidArgument, e.what());
    } catch (const std::bad_alloc&) {
      return status(api, ort::ErrorCode::kFail, "out of memory");
    } catch (const std::exception& e) {
      return status(api, ort::ErrorCode::kFail, e.what());
    } catch (...) {
      return status(api, ort::ErrorCode::kFail, "unknown error");
    }
  }
  static ort::Status* status(const ort::Api* api, ort::ErrorCode code, const char* what) noexcept {
    char text[640];
    std::snprintf(text, sizeof text, "%s::%s: %s", Kernel::kDomain, Kernel::kName, what);
    return api->create_status(code, text);
  }

  static ort::OpTable make() {
    using ort::OpTable;
    OpTable op{};
    op.version = ort::kApiVersion;
    op.name = [](const OpTable*) { return Kernel::kName; };
    op.execution_provider = [](const OpTable*) -> const char* { return nullptr; };
    op.input_type = [](const OpTable*, size_t i) { return static_cast<int>(Kernel::kInputs[i].type); };
    op.input_count = [](const OpTable*) { return std::size(Kernel::kInputs); };
    op.output_type = [](const OpTable*, size_t i) { return static_cast<int>(Kernel::kOutputs[i].type); };
    op.output_count = [](const OpTable*) { return std::size(Kernel::kOutputs); };
    op.destroy = [](void* kernel) { delete static_cast<Instance*>(kernel); };
    op.input_characteristic = [](const OpTable*, size_t i) { return Kernel::kInputs[i].optional ? 1 : 0; };
    op.output_characteristic = [](const OpTable*, size_t i) { return Kernel::kOutputs[i].optional ? 1 : 0; };
    op.input_memory = [](const OpTable*, size_t) { return 0; };
    op.variadic_input_min = op.variadic_output_min = [](const OpTable*) { return 1; };
    op.variadic_input_homogeneous = op.variadic_output_homogeneous = [](const OpTable*) { return 1; };
    op.create_kernel_v2 = [](const OpTable*, const ort::Api* api, const ort::KernelInfo* info, void** out) {
      return guarded(api, [&] { *out = new Instance(api, info); });
    };
    op.compute_v2 = [](void* kernel, ort::KernelContext* context) {
      Instance* self = static_cast<Instance*>(kernel);
      return guarded(self->api, [&] {
        Context call(self->api, context, Kernel::kInputs, Kernel::kOutputs);
        self->kernel.compute(call);
      });
    };
    return op;
  }
};

#define SPECEXPORT_REGISTER_AS(NAME, ...) \
  static const ::specexport::Registration NAME(__VA_ARGS__::kDomain, ::specexport::CustomOp<__VA_ARGS__>::table())
#define SPECEXPORT_JOIN_(A, B) A##B
#define SPECEXPORT_JOIN(A, B) SPECEXPORT_JOIN_(A, B)
#define SPECEXPORT_REGISTER(...) SPECEXPORT_REGISTER_AS(SPECEXPORT_JOIN(registration_, __COUNTER__), __VA_ARGS__)

}  // namespace specexport
