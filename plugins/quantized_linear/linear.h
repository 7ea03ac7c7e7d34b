// QuantizedLinear without ONNX Runtime: what one node computes, and running it over rows.
#pragma once

#include <cstdint>

namespace specexport {

enum class Norm { kNone, kRms, kLayer };
enum class Activation { kNone, kSilu, kGelu, kGeluTanh, kRelu };

constexpr int kTile = 16;          // outputs of a weight tile
constexpr int kGroup = 32;         // input features that share an activation scale
constexpr int kRowBlock = 8;       // rows that one pass over a pair of tiles serves: sixteen integer sums in registers
constexpr int kRowsAtOnce = 256;   // rows prepared together: what then stays in the cache beside the tiles

// One node's constants.
struct LinearConfig {
  int64_t in_features = 0;
  int64_t out_features = 0;
  int bits = 4;  // of weights: 4, 8 or 32
  int group_size = 32;
  bool has_minimum = false;
  int activation_bits = 8;  // 8, 16 or 32
  Norm norm = Norm::kNone;
  float epsilon = 1e-5f;
  Activation activation = Activation::kNone;
  bool gated = false;

  bool quantizes_activations() const { return activation_bits != 32; }
  // int8 numbers that an activation is made of: itself, or 128 * first + second.
  int planes() const { return activation_bits == 16 ? 2 : 1; }
  // Columns of y.
  int64_t outputs() const { return gated ? out_features / 2 : out_features; }
  // Gate and up tiles alternate.
  int64_t tiles() const { return (outputs() + kTile - 1) / kTile * (gated ? 2 : 1); }
  // Work for threads: a pair of tiles, which shares what is loaded of the activations; the last may be one tile.
  int64_t units() const { return (tiles() + 1) / 2; }
  // Scale groups of a row; a group's size is a power of two, and a division a tile would show.
  int64_t groups() const { return in_features >> __builtin_ctz(group_size); }
  int64_t tile_bytes() const {
    if (bits == 32) return in_features * kTile * 4;
    return (has_minimum ? groups() : (groups() + 1) / 2) * 64 + in_features * kTile * bits / 8;
  }
  int64_t packed_bytes() const { return tiles() * tile_bytes(); }
};

// The tensors of one call; absent optional ones are null.
struct LinearTensors {
  const float* x = nullptr;         // [rows, in_features]
  const uint8_t* packed = nullptr;  // [packed_bytes], in pack.py's order
  const float* bias = nullptr;      // [out_features]
  const float* norm_weight = nullptr;
  const float* norm_bias = nullptr;
  const float* residual = nullptr;  // [rows, outputs]
  float* y = nullptr;               // [rows, outputs]
  int64_t rows = 0;
};

// y = residual + act(W quantized(norm(x)) + bias). A row of y depends on nothing but its own row of x, bit for bit.
// Calls by several threads at once are fine. Throws std::bad_alloc.
void run_linear(const LinearConfig& config, const LinearTensors& tensors);

// Rows of x, ready for the dot products. Quantized rows lie in blocks of kRowBlock (the last one may be smaller, R rows):
// of block b the integers start at `integers + b * kRowBlock * in_features * planes` as [K/32][R][planes][32] int8 and
// what belongs to them at `scales + b * kRowBlock * (in_features / 32) * 3` as [K/32][3][R]: scale, scale times the sum
// of the integers, and (as int32) what a group's dot product starts from, to undo the weights' unsigned offset.
struct PreparedRows {
  int8_t* integers = nullptr;
  float* scales = nullptr;
  float* reals = nullptr;         // [rows, in_features], for activations of 32 bits
  int64_t first = 0;              // of the call's rows
  int64_t count = 0;              // at most kRowsAtOnce
  int64_t scales_per_row(const LinearConfig& config) const { return config.in_features / kGroup * 3; }
};

// One instruction set's code.
struct LinearKernels {
  // Norms and quantizes rows [begin, end) of `rows`.
  void (*prepare)(const LinearConfig&, const LinearTensors&, const PreparedRows& rows, int64_t begin, int64_t end);
  // Computes the outputs of units [begin, end) for all of `rows`.
  void (*multiply)(const LinearConfig&, const LinearTensors&, const PreparedRows& rows, int64_t begin, int64_t end);
};

}  // namespace specexport
