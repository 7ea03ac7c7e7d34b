// Compiles a kernel source once for every instruction set, each in its own namespace.
//
//   #define SPECEXPORT_KERNEL_SOURCE "quantized_linear/kernels.inl"
//   #include "for_each_isa.h"
//
// The source is plain code over the vector types of vector.inl and may look at SPECEXPORT_AVX512, SPECEXPORT_AVX2 and
// SPECEXPORT_PORTABLE. It includes no headers of its own: what it needs must be included before. Everything lands in
// `specexport::avx512_vnni`, `specexport::avx2` and `specexport::portable`, with internal linkage, so that no copy that
// was compiled for a newer machine can be merged with another one.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "float16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SPECEXPORT_PORTABLE 1
namespace specexport {
namespace portable {
namespace {
#include "vector.inl"
#include SPECEXPORT_KERNEL_SOURCE
}  // namespace
}  // namespace portable
}  // namespace specexport
#undef SPECEXPORT_PORTABLE

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define SPECEXPORT_AVX2 1
namespace specexport {
namespace avx2 {
namespace {
#include "vector.inl"
#include SPECEXPORT_KERNEL_SOURCE
}  // namespace
}  // namespace avx2
}  // namespace specexport
#undef SPECEXPORT_AVX2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#define SPECEXPORT_AVX512 1
namespace specexport {
namespace avx512_vnni {
namespace {
#include "vector.inl"
#include SPECEXPORT_KERNEL_SOURCE
}  // namespace
}  // namespace avx512_vnni
}  // namespace specexport
#undef SPECEXPORT_AVX512
#pragma GCC pop_options
#endif
