// Rows of x before the dot products: norm, then quantization by groups of 32 to int8, or to two planes of it.

constexpr int kLanes = 16 / kWidth;  // vectors to sixteen values

// The norm of one row as y = (x - mean) * factor * weight + bias.
struct RowNorm {
  bool active = false;
  float mean = 0, factor = 1;
  const float* weight = nullptr;
  const float* bias = nullptr;
};

// Sum over a row of (x - mean)^2, or of x where `squared` is false: sixteen running sums, then one tree.
template <bool squared>
float row_sum(const float* x, int64_t count, float mean) {
  F sums[kLanes] = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int l = 0; l < kLanes; l++) {
      const F v = load(x + i + l * kWidth) - splat(mean);
      sums[l] = sums[l] + (squared ? v * v : v);
    }
  }
  float lanes[16];
  for (int l = 0; l < kLanes; l++) store(lanes + l * kWidth, sums[l]);
  for (int l = 0; i < count; i++, l++) {
    const float v = x[i] - mean;
    lanes[l] += squared ? v * v : v;
  }
  return sum16(lanes);
}

RowNorm row_norm(const LinearConfig& config, const LinearTensors& tensors, const float* x) {
  RowNorm norm;
  if (config.norm == Norm::kNone) return norm;
  const int64_t count = config.in_features;
  norm.active = true;
  norm.weight = tensors.norm_weight;
  norm.bias = tensors.norm_bias;
  if (config.norm == Norm::kLayer) norm.mean = row_sum<false>(x, count, 0.0f) / static_cast<float>(count);
  const float variance = row_sum<true>(x, count, norm.mean) / static_cast<float>(count);
  norm.factor = 1.0f / std::sqrt(variance + config.epsilon);
  return norm;
}

// kWidth values of the normed row from column k on.
SPECEXPORT_INLINE F normed(const RowNorm& norm, const float* x, int64_t k) {
  F v = load(x + k);
  if (norm.active) {
    v = (v - splat(norm.mean)) * splat(norm.factor);
    if (norm.weight != nullptr) v = v * load(norm.weight + k);
    if (norm.bias != nullptr) v = v + load(norm.bias + k);
  }
  return v;
}

SPECEXPORT_INLINE void store_int8(int8_t* to, I v) {
#if defined(SPECEXPORT_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)v));
#else
  for (int j = 0; j < kWidth; j++) to[j] = static_cast<int8_t>(v[j]);
#endif
}

// Quantizes one group of 32 values (as vectors) to `q`, [kPlanes][32]. Returns the sum of the integers; *scale is
// amax / 127. With two planes it is amax / 16256 (127 * 128), and an integer 128 * first + second, second in [-64, 63].
template <int kPlanes>
SPECEXPORT_INLINE int32_t quantize_group(const F* values, int8_t* q, float* scale) {
  constexpr int kVectors = kGroup / kWidth;
  // As integers, the bits of |v| order like the values, and a NaN lies above infinity: it cannot be lost.
  I top = magnitude_bits(values[0]);
  for (int i = 1; i < kVectors; i++) top = larger(top, magnitude_bits(values[i]));
  const int32_t most = largest(top);
  float amax;
  std::memcpy(&amax, &most, sizeof amax);
  *scale = amax / (kPlanes == 2 ? 16256.0f : 127.0f);
  const float inverse = *scale > 0 ? 1.0f / *scale : 0.0f;
  if (!std::isfinite(amax) || !std::isfinite(inverse)) {  // No integer is defined: the scale carries the NaN on.
    std::memset(q, 0, kGroup * kPlanes);
    return 0;
  }
  I sum = splat(int32_t{0});
  for (int i = 0; i < kVectors; i++) {
    const I rounded = __builtin_convertvector(round_even(values[i] * splat(inverse)), I);
    sum = sum + rounded;
    if (kPlanes == 2) {
      const I first = (rounded + 64) >> 7;
      store_int8(q + i * kWidth, first);
      store_int8(q + kGroup + i * kWidth, rounded - (first << 7));
    } else {
      store_int8(q + i * kWidth, rounded);
    }
  }
  return total(sum);
}

template <int kPlanes>
void prepare_quantized(const LinearConfig& config, const LinearTensors& tensors, const PreparedRows& rows,
                       int64_t row) {
  const int64_t block = row / kRowBlock, at = row % kRowBlock;
  const int64_t in_block = std::min<int64_t>(kRowBlock, rows.count - block * kRowBlock);
  int8_t* q = rows.integers + (block * kRowBlock * config.in_features + at * kGroup) * kPlanes;
  float* scales = rows.scales + block * kRowBlock * rows.scales_per_row(config) + at;
  const float* x = tensors.x + (rows.first + row) * config.in_features;
  const RowNorm norm = row_norm(config, tensors, x);
  const int32_t offset = config.bits == 8 ? 128 : config.has_minimum ? 0 : 8;
  for (int64_t k = 0; k < config.in_features; k += kGroup) {
    F values[kGroup / kWidth];
    for (int i = 0; i < kGroup / kWidth; i++) values[i] = normed(norm, x, k + i * kWidth);
    float scale;
    const int32_t sum = quantize_group<kPlanes>(values, q, &scale);
    const int32_t start = -offset * sum;
    scales[0] = scale;
    scales[in_block] = scale * static_cast<float>(sum);
    std::memcpy(scales + 2 * in_block, &start, sizeof start);
    q += in_block * kGroup * kPlanes;
    scales += in_block * 3;
  }
}

void prepare_real(const LinearConfig& config, const LinearTensors& tensors, const PreparedRows& rows, int64_t row) {
  if (config.norm == Norm::kNone) return;  // multiply() reads x itself
  const int64_t count = config.in_features;
  const float* x = tensors.x + (rows.first + row) * count;
  float* y = rows.reals + row * count;
  const RowNorm norm = row_norm(config, tensors, x);
  int64_t k = 0;
  for (; k + kWidth <= count; k += kWidth) store(y + k, normed(norm, x, k));
  for (; k < count; k++) {
    float v = (x[k] - norm.mean) * norm.factor;
    if (norm.weight != nullptr) v = v * norm.weight[k];
    if (norm.bias != nullptr) v = v + norm.bias[k];
    y[k] = v;
  }
}

void prepare(const LinearConfig& config, const LinearTensors& tensors, const PreparedRows& rows, int64_t begin,
             int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    if (config.activation_bits == 8) {
      prepare_quantized<1>(config, tensors, rows, row);
    } else if (config.activation_bits == 16) {
      prepare_quantized<2>(config, tensors, rows, row);
    } else {
      prepare_real(config, tensors, rows, row);
    }
  }
}
