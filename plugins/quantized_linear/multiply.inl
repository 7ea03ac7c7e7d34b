// Tiles times prepared rows, and what follows the product: bias, activation, gate, residual.

SPECEXPORT_INLINE F activate(F v, Activation activation) {
  const F one = splat(1.0f);
  switch (activation) {
    case Activation::kSilu:
      return v / (one + exponential(-v));
    case Activation::kRelu:
      return v < F{} ? F{} : v;
    case Activation::kGelu: {
      // v / 2 * erfc(-v / sqrt(2)): no cancellation on the negative side.
      const F z = v * splat(0.70710678118654752f);
      const F tail = erfc_positive((F)magnitude_bits(z));
      return v * splat(0.5f) * (z > F{} ? splat(2.0f) - tail : tail);
    }
    case Activation::kGeluTanh: {
      // (1 + tanh(u)) / 2 is the logistic function of 2 u.
      const F u = splat(1.5957691216057308f) * (v + splat(0.044715f) * (v * v * v));
      return v / (one + exponential(-u));
    }
    default:
      return v;
  }
}

// Sums of a tile, [rows][16], by row block.
SPECEXPORT_INLINE void tile_sums(const LinearConfig& config, const LinearTensors& tensors, const PreparedRows& rows,
                                 const uint8_t* tile, int64_t row, int count, float* out) {
  if (config.activation_bits == 32) {
    const float* x = config.norm == Norm::kNone ? tensors.x + (rows.first + row) * config.in_features
                                                : rows.reals + row * config.in_features;
    return real_block(config, tile, x, count, out);
  }
  const int8_t* q = rows.integers + row * config.in_features * config.planes();
  const float* scales = rows.scales + row * rows.scales_per_row(config);
  if (config.planes() == 2) return integer_sums<2>(config, tile, q, scales, count, out);
  return integer_sums<1>(config, tile, q, scales, count, out);
}

// Sixteen numbers from `from` on; those past `count` are 0. `from` may be null: all 0.
SPECEXPORT_INLINE void load_tile(const float* from, int count, float* to) {
  for (int i = 0; i < kTile; i++) to[i] = 0;
  if (from != nullptr) std::memcpy(to, from, sizeof(float) * count);
}

void multiply(const LinearConfig& config, const LinearTensors& tensors, const PreparedRows& rows, int64_t begin,
              int64_t end) {
  const int64_t outputs = config.outputs(), tile_bytes = config.tile_bytes();
  for (int64_t unit = begin; unit < end; unit++) {
    const uint8_t* tile = tensors.packed + unit * config.tiles_per_unit() * tile_bytes;
    const int64_t column = unit * kTile;
    const int width = static_cast<int>(std::min<int64_t>(kTile, outputs - column));
    alignas(64) float bias[2][kTile];
    load_tile(tensors.bias == nullptr ? nullptr : tensors.bias + column, width, bias[0]);
    if (config.gated) load_tile(tensors.bias == nullptr ? nullptr : tensors.bias + outputs + column, width, bias[1]);
    for (int64_t row = 0; row < rows.count; row += kRowBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kRowBlock, rows.count - row));
      alignas(64) float sums[kRowBlock * kTile];
      alignas(64) float up[kRowBlock * kTile];
      tile_sums(config, tensors, rows, tile, row, count, sums);
      if (config.gated) tile_sums(config, tensors, rows, tile + tile_bytes, row, count, up);
      for (int r = 0; r < count; r++) {
        const int64_t at = (rows.first + row + r) * outputs + column;
        alignas(64) float residual[kTile];
        if (tensors.residual != nullptr) load_tile(tensors.residual + at, width, residual);
        float* result = sums + r * kTile;
        for (int lane = 0; lane < kTile; lane += kWidth) {
          F v = load(result + lane);
          if (tensors.bias != nullptr) v = v + load(bias[0] + lane);
          v = activate(v, config.activation);
          if (config.gated) {
            F gated = load(up + r * kTile + lane);
            if (tensors.bias != nullptr) gated = gated + load(bias[1] + lane);
            v = v * gated;
          }
          if (tensors.residual != nullptr) v = v + load(residual + lane);
          store(result + lane, v);
        }
        std::memcpy(tensors.y + at, result, sizeof(float) * width);
      }
    }
  }
}

[[maybe_unused]] const LinearKernels kLinearKernels = {prepare, multiply};
