// The few parts of ONNX Runtime's C ABI that kernels need.
//
// The wheels of ONNX Runtime ship no headers. Its C ABI only ever grows at the end, so positions in its function table
// are facts that stay true; those used here are written down below and nothing else of the runtime is.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specexport::ort {

// Opaque objects of the runtime.
struct Status;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct Value;
struct TensorInfo;

// The first version whose kernels can report an error (CreateKernelV2, KernelComputeV2).
constexpr uint32_t kApiVersion = 16;

enum class ElementType : int {
  kUndefined = 0,
  kFloat = 1,
  kUInt8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
};

enum class ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

// The runtime's function table; every entry is a function pointer.
struct Api {
  const void* functions[100];

  Status* create_status(ErrorCode code, const char* message) const {
    return at<Status*(int, const char*)>(0)(static_cast<int>(code), message);
  }
  Status* create_domain(const char* name, CustomOpDomain** out) const {
    return at<Status*(const char*, CustomOpDomain**)>(26)(name, out);
  }
  Status* add_op(CustomOpDomain* domain, const void* op) const {
    return at<Status*(CustomOpDomain*, const void*)>(27)(domain, op);
  }
  Status* add_domain(SessionOptions* options, CustomOpDomain* domain) const {
    return at<Status*(SessionOptions*, CustomOpDomain*)>(28)(options, domain);
  }
  Status* mutable_data(const Value* value, void** out) const {
    return at<Status*(Value*, void**)>(51)(const_cast<Value*>(value), out);
  }
  Status* element_type(const TensorInfo* info, int* out) const {
    return at<Status*(const TensorInfo*, int*)>(60)(info, out);
  }
  Status* rank(const TensorInfo* info, size_t* out) const {
    return at<Status*(const TensorInfo*, size_t*)>(61)(info, out);
  }
  Status* dimensions(const TensorInfo* info, int64_t* out, size_t rank) const {
    return at<Status*(const TensorInfo*, int64_t*, size_t)>(62)(info, out, rank);
  }
  Status* type_and_shape(const Value* value, TensorInfo** out) const {
    return at<Status*(const Value*, TensorInfo**)>(65)(value, out);
  }
  Status* attribute(const KernelInfo* info, const char* name, float* out) const {
    return at<Status*(const KernelInfo*, const char*, float*)>(85)(info, name, out);
  }
  Status* attribute(const KernelInfo* info, const char* name, int64_t* out) const {
    return at<Status*(const KernelInfo*, const char*, int64_t*)>(86)(info, name, out);
  }
  Status* attribute(const KernelInfo* info, const char* name, char* out, size_t* size) const {
    return at<Status*(const KernelInfo*, const char*, char*, size_t*)>(87)(info, name, out, size);
  }
  Status* input_count(const KernelContext* context, size_t* out) const {
    return at<Status*(const KernelContext*, size_t*)>(88)(context, out);
  }
  Status* output_count(const KernelContext* context, size_t* out) const {
    return at<Status*(const KernelContext*, size_t*)>(89)(context, out);
  }
  Status* input(const KernelContext* context, size_t index, const Value** out) const {
    return at<Status*(const KernelContext*, size_t, const Value**)>(90)(context, index, out);
  }
  Status* output(KernelContext* context, size_t index, const int64_t* dims, size_t rank, Value** out) const {
    return at<Status*(KernelContext*, size_t, const int64_t*, size_t, Value**)>(91)(context, index, dims, rank, out);
  }
  void release(Status* status) const { at<void(Status*)>(93)(status); }
  void release(TensorInfo* info) const { at<void(TensorInfo*)>(99)(info); }

 private:
  template <class Signature>
  Signature* at(int position) const {
    return reinterpret_cast<Signature*>(const_cast<void*>(functions[position]));
  }
};

struct ApiBase {
  const Api* (*get_api)(uint32_t version);
  const char* (*version_string)();
};

// What the runtime calls to learn about an op and to run it; version 16's layout, with zeroed room behind it.
struct OpTable {
  uint32_t version;
  void* (*create_kernel)(const OpTable*, const Api*, const KernelInfo*);
  const char* (*name)(const OpTable*);
  const char* (*execution_provider)(const OpTable*);
  int (*input_type)(const OpTable*, size_t);
  size_t (*input_count)(const OpTable*);
  int (*output_type)(const OpTable*, size_t);
  size_t (*output_count)(const OpTable*);
  void (*compute)(void* kernel, KernelContext*);
  void (*destroy)(void* kernel);
  int (*input_characteristic)(const OpTable*, size_t);   // 0 required, 1 optional
  int (*output_characteristic)(const OpTable*, size_t);  // 0 required, 1 optional
  int (*input_memory)(const OpTable*, size_t);           // 0 default
  int (*variadic_input_min)(const OpTable*);
  int (*variadic_input_homogeneous)(const OpTable*);
  int (*variadic_output_min)(const OpTable*);
  int (*variadic_output_homogeneous)(const OpTable*);
  Status* (*create_kernel_v2)(const OpTable*, const Api*, const KernelInfo*, void** kernel);
  Status* (*compute_v2)(void* kernel, KernelContext*);
  void* room[16];
};

}  // namespace specexport::ort
