// One call of QuantizedKVAttention, checked, and the steps that it is made of.
#pragma once

#include <cstdint>

#include "cpu_features.h"

namespace specexport::attention {

// Cache positions are walked in chunks and, inside, in blocks, both at absolute positions: what a query row computes
// then depends on its own position only.
constexpr int kBlock = 64;
constexpr int kChunk = 256;
constexpr int kMaxHeadDim = 1024;

// The key or the value cache of a layer.
struct CacheSide {
  int bits = 0;                // 16 or 8.
  int group_size = 0;          // Channels that share a scale; 0 at 16 bits.
  void* rows = nullptr;        // [B, Hkv, C, D] of int8_t, or of float16 as uint16_t.
  uint16_t* scales = nullptr;  // [B, Hkv, C, D / group_size]; null at 16 bits.
};

struct Call {
  int64_t batch = 0, rows = 0, capacity = 0;
  int q_heads = 0, kv_heads = 0, repeats = 0, head_dim = 0, rotary_half = 0;
  int64_t window = 0;
  float scale = 0, softcap = 0, epsilon = 0;
  bool interleaved = false;
  const float* qkv = nullptr;  // [B, S, (Hq + 2 Hkv) D]
  const int64_t* past = nullptr;
  const int64_t* query = nullptr;
  const float* cos = nullptr;  // [P, R / 2], null without RoPE.
  const float* sin = nullptr;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  const float* sinks = nullptr;
  CacheSide key, value;
  float* y = nullptr;  // [B, S, Hq D]

  int padded_dim() const { return (head_dim + 15) & ~15; }
};

// Whether both caches are int8 with scales that hold for whole vectors: scores and weighted sums may then be of integers
// (integer_chunks.inl) where the instruction set has a use for it.
inline bool suits_integers(const Call& call) {
  return call.key.bits == 8 && call.value.bits == 8 && call.key.group_size % 16 == 0 && call.value.group_size % 16 == 0;
}

// Query rows of one sequence and key head, against the chunks [first, last] of its cache.
struct Item {
  int64_t b = 0, s0 = 0, s1 = 0;
  int64_t first = 0, last = 0;
  int kv_head = 0;
};

struct Scratch;

// Results of single chunks, when the chunks of a cache are spread over threads: merged in order by the last to finish.
struct Partials {
  float* sums = nullptr;          // [B Hkv, rows, chunks, padded D]
  float* maxima = nullptr;        // [B Hkv, rows, chunks]
  float* denominators = nullptr;  // [B Hkv, rows, chunks]
  int* unfinished = nullptr;      // [B Hkv]
  int64_t rows = 0, chunks = 0;
};

// The steps of a call, one set an instruction set and kind of cache.
struct Steps {
  // Norm and RoPE of the row (b, s); its q to `queries` [B, Hkv, S, Hq / Hkv, D], its k and v into the cache.
  void (*prepare)(const Call& call, int64_t b, int64_t s, float* queries);
  // All of an item's chunks in order, then y.
  void (*attend)(const Call& call, const Item& item, const float* queries, const Scratch& scratch);
  // The item's one chunk into `partials`; the last of its sequence and head merges, then y.
  void (*attend_chunk)(const Call& call, const Item& item, const float* queries, const Scratch& scratch,
                       const Partials& partials);
};

Steps steps(Isa isa, const Call& call);

// The first cache position that the row at `position` attends; the last is its own.
inline int64_t first_position(const Call& call, int64_t position) {
  return call.window > 0 && position + 1 > call.window ? position + 1 - call.window : 0;
}

}  // namespace specexport::attention
