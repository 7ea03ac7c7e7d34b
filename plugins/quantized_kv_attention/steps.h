// The steps of attention for every instruction set, from one source. Included by cpu.cc only.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// GCC 12 takes the undefined operand inside its own AVX-512 intrinsics for ours (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "quantized_kv_attention/attention_call.h"
#include "quantized_kv_attention/half.h"

namespace specexport::attention {

namespace portable {
#include "quantized_kv_attention/vectors_portable.inl"

#include "quantized_kv_attention/prepare.inl"

#include "quantized_kv_attention/functions.inl"

#include "quantized_kv_attention/dequantize.inl"

#include "quantized_kv_attention/tiles.inl"

#include "quantized_kv_attention/attend.inl"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#include "quantized_kv_attention/vectors_avx2.inl"

#include "quantized_kv_attention/prepare.inl"

#include "quantized_kv_attention/functions.inl"

#include "quantized_kv_attention/dequantize.inl"

#include "quantized_kv_attention/tiles.inl"

#include "quantized_kv_attention/attend.inl"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace avx512 {
#include "quantized_kv_attention/vectors_avx512.inl"

#include "quantized_kv_attention/functions.inl"

#include "quantized_kv_attention/dequantize.inl"

#include "quantized_kv_attention/tiles.inl"

#include "quantized_kv_attention/attend.inl"
}  // namespace avx512
#pragma GCC pop_options
#endif

Steps steps(Isa isa) {
#if defined(__x86_64__)
  // A head dimension is a multiple of 8, so preparing rows stays with vectors of eight.
  if (isa == Isa::kAvx512Vnni) return {avx2::prepare, avx512::attend, avx512::attend_chunk};
  if (isa == Isa::kAvx2) return {avx2::prepare, avx2::attend, avx2::attend_chunk};
#endif
  (void)isa;
  return {portable::prepare, portable::attend, portable::attend_chunk};
}

}  // namespace specexport::attention

#pragma GCC diagnostic pop
