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
#include "quantized_kv_attention/scratch.h"

namespace specexport::attention {

namespace portable {
#include "quantized_kv_attention/vectors_portable.inl"

#include "quantized_kv_attention/prepare.inl"

#include "quantized_kv_attention/functions.inl"

#include "quantized_kv_attention/softmax.inl"

#include "quantized_kv_attention/dequantize.inl"

#include "quantized_kv_attention/tiles.inl"

#include "quantized_kv_attention/spans.inl"

#include "quantized_kv_attention/float_chunks.inl"

#include "quantized_kv_attention/attend.inl"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#include "quantized_kv_attention/vectors_avx2.inl"

#include "quantized_kv_attention/prepare.inl"

#include "quantized_kv_attention/functions.inl"

#include "quantized_kv_attention/softmax.inl"

#include "quantized_kv_attention/dequantize.inl"

#include "quantized_kv_attention/tiles.inl"

#include "quantized_kv_attention/spans.inl"

#include "quantized_kv_attention/float_chunks.inl"

#include "quantized_kv_attention/attend.inl"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
namespace avx512 {
#include "quantized_kv_attention/vectors_avx512.inl"

#include "quantized_kv_attention/functions.inl"

#include "quantized_kv_attention/softmax.inl"

#include "quantized_kv_attention/dequantize.inl"

#include "quantized_kv_attention/tiles.inl"

#include "quantized_kv_attention/spans.inl"

#include "quantized_kv_attention/float_chunks.inl"

#include "quantized_kv_attention/integer_packing.inl"

#include "quantized_kv_attention/integer_planes.inl"

#include "quantized_kv_attention/integer_dots_vnni.inl"

#include "quantized_kv_attention/integer_chunks.inl"

#include "quantized_kv_attention/attend.inl"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-int8,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
namespace amx {
#include "quantized_kv_attention/vectors_avx512.inl"

#include "quantized_kv_attention/functions.inl"

#include "quantized_kv_attention/softmax.inl"

#include "quantized_kv_attention/spans.inl"

#include "quantized_kv_attention/integer_packing.inl"

#include "quantized_kv_attention/integer_planes.inl"

#include "quantized_kv_attention/integer_dots_amx.inl"

#include "quantized_kv_attention/integer_chunks.inl"

#include "quantized_kv_attention/attend.inl"
}  // namespace amx
#pragma GCC pop_options
#endif

constexpr int64_t kFewRows = 4;  // Query rows of a key head.

Steps steps(Isa isa, const Call& call) {
#if defined(__x86_64__)
  // A head dimension is a multiple of 8, so preparing rows stays with vectors of eight.
  // Both ways with integers give the same bits; setting up tiles pays from some rows on. Without tiles three planes of
  // integers are slower than float for many rows, and few must have the same bits.
  if (isa == Isa::kAmx && suits_integers(call)) {
    if (call.rows * call.repeats > kFewRows)
      return {avx2::prepare, amx::attend<amx::IntegerChunks>, amx::attend_chunk<amx::IntegerChunks>};
    return {avx2::prepare, avx512::attend<avx512::IntegerChunks>, avx512::attend_chunk<avx512::IntegerChunks>};
  }
  if (isa >= Isa::kAvx512Vnni)
    return {avx2::prepare, avx512::attend<avx512::FloatChunks>, avx512::attend_chunk<avx512::FloatChunks>};
  if (isa == Isa::kAvx2)
    return {avx2::prepare, avx2::attend<avx2::FloatChunks>, avx2::attend_chunk<avx2::FloatChunks>};
#endif
  (void)isa;
  (void)call;
  return {portable::prepare, portable::attend<portable::FloatChunks>, portable::attend_chunk<portable::FloatChunks>};
}

}  // namespace specexport::attention

#pragma GCC diagnostic pop
