// The memory that a call works in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "quantized_kv_attention/attention_call.h"

namespace specexport::attention {

// Cache-line aligned memory that only grows.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  T* reserve(size_t count) {
    if (count > capacity_) {
      count += count / 2;  // A growing cache grows it rarely.
      std::free(data_);
      data_ = nullptr;
      capacity_ = 0;
      const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
      data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      capacity_ = bytes / sizeof(T);
    }
    return data_;
  }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t capacity_ = 0;
};

// Hands out aligned pieces of one block of memory; from null, it only counts.
class Pieces {
 public:
  explicit Pieces(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  void take(T** piece, size_t count) {
    *piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * sizeof(T) + 63) / 64 * 64;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* memory_;
  size_t bytes_ = 0;
};

// What an item needs of its chunks in float.
struct FloatBlocks {
  float* keys = nullptr;    // [D, kBlock]: a block of the key cache, transposed.
  float* values = nullptr;  // [kBlock, padded D]
  float* scores = nullptr;  // [rows, kChunk]
  size_t bytes = 0;

  FloatBlocks(void* memory, const Call& call, int rows = 0) {
    Pieces pieces(memory);
    pieces.take(&keys, static_cast<size_t>(kBlock) * call.head_dim);
    pieces.take(&values, static_cast<size_t>(kBlock) * call.padded_dim());
    pieces.take(&scores, static_cast<size_t>(kChunk) * rows);
    bytes = pieces.bytes();
  }
};

constexpr int kTile = 16;   // Rows, or keys, or channels of a tile of integers.
constexpr int kPlanes = 3;  // Bytes of a query's element, and of a weight.

// What an item needs of its chunks in integers. Tiles are [depth / 4][kTile][4]: what one dot product of four bytes a
// lane takes.
struct IntegerBlocks {
  uint8_t* keys = nullptr;         // [kChunk / kTile, D / 4, kTile, 4]
  int8_t* values = nullptr;        // [kChunk / kBlock, D / kTile, kBlock / 4, kTile, 4]
  float* key_scales = nullptr;     // [groups, kChunk]
  float* value_scales = nullptr;   // [groups, kChunk]
  float* scores = nullptr;         // [kTile, kChunk], of one tile of rows
  uint8_t* weights = nullptr;      // [kPlanes, kTile, kChunk]
  float* weight_steps = nullptr;   // [kTile]
  int32_t* dots = nullptr;         // [2, kPlanes, kTile, kTile]
  float* query_steps = nullptr;    // [rows]
  int32_t* query_sums = nullptr;   // [row tiles, groups, kPlanes, kTile]
  int8_t* queries = nullptr;       // [row tiles, kPlanes, kTile, D]
  size_t bytes = 0;

  IntegerBlocks(void* memory, const Call& call, int rows = 0) {
    const size_t dim = call.head_dim, tiles = (rows + kTile - 1) / kTile, key_groups = dim / call.key.group_size;
    Pieces pieces(memory);
    pieces.take(&keys, kChunk * dim);
    pieces.take(&values, kChunk * dim);
    pieces.take(&key_scales, kChunk * key_groups);
    pieces.take(&value_scales, kChunk * (dim / call.value.group_size));
    pieces.take(&scores, kTile * kChunk);
    pieces.take(&weights, kPlanes * kTile * kChunk);
    pieces.take(&weight_steps, kTile);
    pieces.take(&dots, 2 * kPlanes * kTile * kTile);
    pieces.take(&query_steps, tiles * kTile);
    pieces.take(&query_sums, tiles * key_groups * kPlanes * kTile);
    pieces.take(&queries, tiles * kPlanes * kTile * dim);
    bytes = pieces.bytes();
  }
};

// What one thread needs for one item.
struct Scratch {
  float* chunk = nullptr;          // [rows, padded D]: weighted sums over a chunk.
  float* total = nullptr;          // [rows, padded D]: over all chunks so far.
  float* maximum = nullptr;        // [rows], of the chunks so far
  float* denominator = nullptr;    // [rows]
  float* chunk_maximum = nullptr;  // [rows]
  float* chunk_denominator = nullptr;
  char* blocks = nullptr;  // FloatBlocks or IntegerBlocks
  int rows = 0;
  size_t bytes = 0;

  Scratch(void* memory, const Call& call, int item_rows) : rows(item_rows) {
    const size_t sums = static_cast<size_t>(rows) * call.padded_dim();
    Pieces pieces(memory);
    pieces.take(&chunk, sums);
    pieces.take(&total, sums);
    pieces.take(&maximum, rows);
    pieces.take(&denominator, rows);
    pieces.take(&chunk_maximum, rows);
    pieces.take(&chunk_denominator, rows);
    size_t most = FloatBlocks(nullptr, call, rows).bytes;
    if (suits_integers(call)) {
      const size_t integers = IntegerBlocks(nullptr, call, rows).bytes;
      most = most < integers ? integers : most;
    }
    pieces.take(&blocks, most);
    bytes = pieces.bytes();
  }
};

}  // namespace specexport::attention
