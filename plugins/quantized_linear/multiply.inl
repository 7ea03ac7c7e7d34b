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

// Sums of `tiles` tiles for `count` rows of a block, to `out`, [tiles][kRowBlock][16].
SPECEXPORT_INLINE void tile_sums(const LinearConfig& config, const LinearTensors& tensors, const PreparedRows& rows,
                                 const uint8_t* tile, int tiles, int64_t row, int count, float* out) {
  if (config.activation_bits == 32) {
    const float* x = config.norm == Norm::kNone ? tensors.x + (rows.first + row) * config.in_features
                                                : rows.reals + row * config.in_features;
    for (int t = 0; t < tiles; t++)
      real_block(config, tile + t * config.tile_bytes(), x, count, out + t * kRowBlock * kTile);
    return;
  }
  const int8_t* q = rows.integers + row * config.in_features * config.planes();
  const float* scales = rows.scales + row * rows.scales_per_row(config);
  if (config.planes() == 2) return integer_sums<2>(config, tile, tiles, q, scales, count, out);
  return integer_sums<1>(config, tile, tiles, q, scales, count, out);
}

// Sixteen numbers from `from` on; those past `count` are 0.
SPECEXPORT_INLINE void load_tile(const float* from, int count, float* to) {
  if (count == kTile) {
    std::memcpy(to, from, sizeof(float) * kTile);
    return;
  }
  for (int i = 0; i < kTile; i++) to[i] = 0;
  std::memcpy(to, from, sizeof(float) * count);
}

// From a tile's sums for `count` rows from `row` on to y, columns from `column` on. When gated, `up` is the other half.
SPECEXPORT_INLINE void finish_tile(const LinearConfig& config, const LinearTensors& tensors, int64_t row, int count,
                                   int64_t column, float* sums, const float* up) {
  const int64_t outputs = config.outputs();
  const int width = static_cast<int>(std::min<int64_t>(kTile, outputs - column));
  alignas(64) float bias[kTile], up_bias[kTile], residual[kTile];
  if (tensors.bias != nullptr) {
    load_tile(tensors.bias + column, width, bias);
    if (config.gated) load_tile(tensors.bias + outputs + column, width, up_bias);
  }
  for (int r = 0; r < count; r++) {
    const int64_t at = (row + r) * outputs + column;
    if (tensors.residual != nullptr) load_tile(tensors.residual + at, width, residual);
    float* result = sums + r * kTile;
    for (int lane = 0; lane < kTile; lane += kWidth) {
      F v = load(result + lane);
      if (tensors.bias != nullptr) v = v + load(bias + lane);
      v = activate(v, config.activation);
      if (config.gated) {
        F gated = load(up + r * kTile + lane);
        if (tensors.bias != nullptr) gated = gated + load(up_bias + lane);
        v = v * gated;
      }
      if (tensors.residual != nullptr) v = v + load(residual + lane);
      store(result + lane, v);
    }
    if (width == kTile) {
      std::memcpy(tensors.y + at, result, sizeof(float) * kTile);
    } else {
      std::memcpy(tensors.y + at, result, sizeof(float) * width);
    }
  }
}

void multiply(const LinearConfig& config, const LinearTensors& tensors, const PreparedRows& rows, int64_t begin,
              int64_t end) {
  constexpr int kSums = kRowBlock * kTile;
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t first = unit * 2;
    const int tiles = static_cast<int>(std::min<int64_t>(2, config.tiles() - first));
    const uint8_t* tile = tensors.packed + first * config.tile_bytes();
    for (int64_t row = 0; row < rows.count; row += kRowBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kRowBlock, rows.count - row));
      alignas(64) float sums[2 * kSums];
      tile_sums(config, tensors, rows, tile, tiles, row, count, sums);
      if (config.gated) {
        finish_tile(config, tensors, rows.first + row, count, unit * kTile, sums, sums + kSums);
      } else {
        for (int t = 0; t < tiles; t++)
          finish_tile(config, tensors, rows.first + row, count, (first + t) * kTile, sums + t * kSums, nullptr);
      }
    }
  }
}

[[maybe_unused]] const LinearKernels kLinearKernels = {prepare, multiply};
