// QuantizedLinear over random odd shapes, in exactly sized buffers, against a naive reading of the packed format.
#include "quantized_linear/linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "cpu_features.h"
#include "float16.h"
#include "quantized_embedding/read_row.h"
#include "thread_pool.h"

using namespace specexport;

namespace {

std::mt19937 generator(7);

int any(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }
float real() { return std::normal_distribution<float>()(generator); }

std::vector<float> reals(int64_t count) {
  std::vector<float> values(count);
  for (float& v : values) v = real();
  return values;
}

LinearConfig random_config() {
  LinearConfig c;
  const int widths[] = {4, 8, 32}, groups[] = {32, 64, 128};
  c.bits = widths[any(0, 2)];
  c.group_size = c.bits == 32 ? 0 : groups[any(0, 2)];
  c.in_features = c.bits == 32 ? any(1, 70) : c.group_size * any(1, 5);
  c.gated = any(0, 1) != 0;
  c.out_features = any(1, 50) * (c.gated ? 2 : 1);
  c.has_minimum = c.bits != 32 && any(0, 1) != 0;
  c.activation_bits = c.bits == 32 || any(0, 2) == 0 ? 32 : any(0, 1) != 0 ? 8 : 16;
  c.norm = static_cast<Norm>(any(0, 2));
  c.activation = static_cast<Activation>(any(0, 4));
  return c;
}

// Random integers, scales of about 0.01.
std::vector<uint8_t> random_packed(const LinearConfig& c) {
  std::vector<uint8_t> packed(c.packed_bytes());
  if (c.bits == 32) {
    for (size_t i = 0; i < packed.size(); i += 4) {
      const float v = real() * 0.1f;
      std::memcpy(&packed[i], &v, 4);
    }
    return packed;
  }
  for (uint8_t& byte : packed) byte = static_cast<uint8_t>(any(0, 255));
  const int64_t groups = c.in_features / c.group_size, group_bytes = c.group_size * kTile * c.bits / 8;
  for (size_t at = 0; at < packed.size();) {
    for (int64_t g = 0; g < groups;) {
      for (int i = 0; i < 32; i++) {
        const uint16_t half = static_cast<uint16_t>(0x2000 + any(0, 0x400) + (any(0, 1) << 15));
        std::memcpy(&packed[at + 2 * i], &half, 2);
      }
      at += 64;
      for (int j = 0; j < (c.has_minimum ? 1 : 2) && g < groups; j++, g++) at += group_bytes;
    }
  }
  return packed;
}

double half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return half_to_float(half);
}

// W[n][k], from the description of the format in pack.py.
double weight(const LinearConfig& c, const uint8_t* packed, int64_t n, int64_t k) {
  const int64_t half = c.outputs(), row = c.gated ? n % half : n;
  const int64_t tile = c.gated ? row / kTile * 2 + n / half : row / kTile;
  const int lane = static_cast<int>(row % kTile);
  const uint8_t* p = packed + tile * c.tile_bytes();
  if (c.bits == 32) {
    float v;
    std::memcpy(&v, p + (k * kTile + lane) * 4, 4);
    return v;
  }
  const int per_block = c.has_minimum ? 1 : 2;
  const int64_t group = k / c.group_size, block = group / per_block, in_block = group % per_block;
  const int64_t group_bytes = c.group_size * kTile * c.bits / 8, inside = k % c.group_size;
  p += block * (64 + per_block * group_bytes);
  const double scale = half_at(p + 32 * in_block + 2 * lane), minimum = c.has_minimum ? half_at(p + 32 + 2 * lane) : 0;
  p += 64 + in_block * group_bytes;
  if (c.bits == 8) return (p[inside / 4 * 64 + lane * 4 + inside % 4] - 128) * scale + minimum;
  const int byte = p[inside / 8 * 64 + lane * 4 + inside % 4];
  const int q = inside % 8 < 4 ? byte & 15 : byte >> 4;
  return (c.has_minimum ? q : q - 8) * scale + minimum;
}

double act(double v, Activation activation) {
  switch (activation) {
    case Activation::kSilu: return v / (1 + std::exp(-v));
    case Activation::kGelu: return v * 0.5 * std::erfc(-v / std::sqrt(2.0));
    case Activation::kGeluTanh: return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
    case Activation::kRelu: return std::max(v, 0.0);
    default: return v;
  }
}

// One row of the prepared activations.
std::vector<double> prepared(const LinearConfig& c, const float* x, const float* norm_weight, const float* norm_bias) {
  std::vector<double> v(x, x + c.in_features);
  if (c.norm != Norm::kNone) {
    double mean = 0, variance = 0;
    if (c.norm == Norm::kLayer) {
      for (double e : v) mean += e / static_cast<double>(v.size());
    }
    for (double& e : v) e -= mean;
    for (double e : v) variance += e * e / static_cast<double>(v.size());
    for (size_t k = 0; k < v.size(); k++)
      v[k] = v[k] / std::sqrt(variance + c.epsilon) * norm_weight[k] + (norm_bias == nullptr ? 0 : norm_bias[k]);
  }
  for (size_t k = 0; c.activation_bits != 32 && k < v.size(); k += kGroup) {
    float amax = 0;
    for (int i = 0; i < kGroup; i++) amax = std::max(amax, std::fabs(static_cast<float>(v[k + i])));
    const float scale = amax / (c.activation_bits == 8 ? 127.0f : 16256.0f), inverse = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < kGroup; i++) v[k + i] = std::nearbyint(static_cast<float>(v[k + i]) * inverse) * double{scale};
  }
  return v;
}

void compare_one() {
  const LinearConfig c = random_config();
  const int64_t rows = any(0, 4) == 0 ? any(1, 300) : any(1, 20), outputs = c.outputs();
  const std::vector<uint8_t> packed = random_packed(c);
  const std::vector<float> x = reals(rows * c.in_features), bias = reals(c.out_features);
  const std::vector<float> norm_weight = reals(c.in_features), norm_bias = reals(c.in_features);
  const std::vector<float> residual = reals(rows * outputs);
  std::vector<float> y(rows * outputs, NAN);
  LinearTensors t;
  t.x = x.data();
  t.packed = packed.data();
  t.bias = any(0, 1) ? bias.data() : nullptr;
  t.norm_weight = c.norm != Norm::kNone ? norm_weight.data() : nullptr;
  t.norm_bias = c.norm != Norm::kNone && any(0, 1) ? norm_bias.data() : nullptr;
  t.residual = any(0, 1) ? residual.data() : nullptr;
  t.y = y.data();
  t.rows = rows;
  set_num_threads(any(1, 3));
  run_linear(c, t);

  for (int trial = 0; trial < 40; trial++) {
    const int64_t r = any(0, static_cast<int>(rows) - 1), n = any(0, static_cast<int>(outputs) - 1);
    const std::vector<double> v = prepared(c, x.data() + r * c.in_features, t.norm_weight, t.norm_bias);
    auto dot = [&](int64_t output, double* size) {
      double sum = t.bias == nullptr ? 0 : bias[output];
      *size = std::fabs(sum);
      for (int64_t k = 0; k < c.in_features; k++) {
        const double product = weight(c, packed.data(), output, k) * v[k];
        sum += product;
        *size += std::fabs(product);
      }
      return sum;
    };
    double size = 0, up_size = 0;
    double expected = act(dot(n, &size), c.activation);
    if (c.gated) {
      const double up = dot(n + outputs, &up_size);
      size = size * std::fabs(up) + (std::fabs(expected) + size) * up_size;
      expected *= up;
    }
    if (t.residual != nullptr) expected += residual[r * outputs + n];
    // Other orders of float32 sums; and, after a norm, an activation that rounds the other way: 1/127 of its group's
    // largest value (1/16256 at 16 bits, but of more of them) against a whole row.
    const double rounded = c.activation_bits == 8 ? 0.01 : c.activation_bits == 16 ? 5e-4 : 1e-5;
    const double allowed = size * (c.norm != Norm::kNone ? rounded : 1e-5) + 1e-5;
    const float found = y[r * outputs + n];
    CHECK(std::fabs(found - expected) <= allowed, "%s bits %d group %d min %d activations %d rows %d: %g, not %g",
          isa_name(isa()), c.bits, c.group_size, c.has_minimum, c.activation_bits, int(rows), found, expected);
  }
}

void compare_rows() {
  LinearConfig c = random_config();
  c.gated = false;
  const std::vector<uint8_t> packed = random_packed(c);
  std::vector<float> y(c.in_features);
  for (int64_t n = 0; n < c.out_features; n++) {
    read_packed_row(c, packed.data(), n, y.data());
    for (int64_t k = 0; k < c.in_features; k++) {
      const float expected = static_cast<float>(weight(c, packed.data(), n, k));
      CHECK(y[k] == expected, "bits %d row %d column %d: %g, not %g", c.bits, int(n), int(k), y[k], expected);
    }
  }
}

}  // namespace

void test_linear() {
  for (int i = 0; i < 30; i++) compare_rows();
  for (const char* name : {"portable", "avx2", "avx512_vnni"}) {
    if (!set_isa(name)) {
      std::printf("%s: not on this machine\n", name);
      continue;
    }
    for (int i = 0; i < 150; i++) compare_one();
  }
  set_isa("auto");
  set_num_threads(0);
}
