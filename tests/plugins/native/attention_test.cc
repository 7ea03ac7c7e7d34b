// QuantizedKVAttention over random odd shapes, in exactly sized buffers: against a naive reading of the cache that it
// left, and bit for bit against one row at a time.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "cpu_features.h"
#include "float16.h"
#include "quantized_kv_attention/attention_call.h"
#include "quantized_kv_attention/schedule.h"
#include "thread_pool.h"

using namespace specexport;
using namespace specexport::attention;

namespace {

std::mt19937 generator(11);

int any(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

std::vector<float> reals(int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(generator);
  return values;
}

// A cache of either kind that owns its memory; positions that no row has written hold NaN.
struct Cache {
  std::vector<int8_t> levels;
  std::vector<uint16_t> halves, scales;

  CacheSide side(int bits, int group_size, int64_t rows, int dim) {
    if (bits == 16) {
      halves.assign(rows * dim, 0x7e00);
      return {16, 0, halves.data(), nullptr};
    }
    levels.assign(rows * dim, 77);
    scales.assign(rows * (dim / group_size), 0x7e00);
    return {8, group_size, levels.data(), scales.data()};
  }
};

double element(const CacheSide& side, int64_t row, int d, int dim) {
  if (side.bits == 16) return half_to_float(static_cast<const uint16_t*>(side.rows)[row * dim + d]);
  const double level = static_cast<const int8_t*>(side.rows)[row * dim + d];
  return level * half_to_float(side.scales[row * (dim / side.group_size) + d / side.group_size]);
}

// One query row against the cache; without RoPE and norm, q is as it came.
void check_row(const Call& call, int64_t b, int64_t s, int h) {
  const int dim = call.head_dim, heads = call.q_heads + 2 * call.kv_heads;
  const int64_t position = call.past[b] + s, first = first_position(call, position);
  const int64_t base = (b * call.kv_heads + h / call.repeats) * call.capacity;
  const float* q = call.qkv + ((b * call.rows + s) * heads + h) * dim;
  std::vector<double> weights, y(dim);
  double total = call.sinks ? std::exp(double{call.sinks[h]}) : 0;
  for (int64_t c = first; c <= position; c++) {
    double score = 0;
    for (int d = 0; d < dim; d++) score += q[d] * element(call.key, base + c, d, dim);
    score *= call.scale;
    if (call.softcap > 0) score = std::tanh(score / call.softcap) * call.softcap;
    weights.push_back(std::exp(score));
    total += weights.back();
  }
  const float* got = call.y + ((b * call.rows + s) * call.q_heads + h) * dim;
  for (int d = 0; d < dim; d++) {
    double expected = 0;
    for (int64_t c = first; c <= position; c++) expected += weights[c - first] / total * element(call.value, base + c, d, dim);
    CHECK(std::fabs(got[d] - expected) < 2e-5, "b %d s %d h %d d %d: %g, expected %g", int(b), int(s), h, d, got[d], expected);
  }
}

void check_case() {
  const int dims[] = {8, 16, 40, 64, 80, 256}, dim = dims[any(0, 5)];
  int group = 8 * any(1, dim / 8);
  while (dim % group != 0) group = 8 * any(1, dim / 8);
  Call call;
  call.batch = any(1, 3);
  call.rows = any(1, 20);
  call.kv_heads = any(1, 3);
  call.repeats = any(1, 5);
  call.q_heads = call.kv_heads * call.repeats;
  call.head_dim = dim;
  call.window = any(0, 2) == 0 ? any(1, 80) : 0;
  call.scale = 1 / std::sqrt(static_cast<float>(dim));
  call.softcap = any(0, 2) == 0 ? 2.0f : 0.0f;
  call.epsilon = 1e-6f;
  std::vector<int64_t> past(call.batch), query(call.batch), single_past(call.batch), one(call.batch);
  for (int64_t b = 0; b < call.batch; b++) {
    query[b] = any(0, static_cast<int>(call.rows));
    past[b] = any(0, 1) == 0 ? 0 : any(0, 300);
    call.capacity = std::max(call.capacity, past[b] + query[b] + any(0, 1));
  }
  const int heads = call.q_heads + 2 * call.kv_heads;
  const int64_t width = static_cast<int64_t>(heads) * dim, out_width = static_cast<int64_t>(call.q_heads) * dim;
  const int64_t cache_rows = call.batch * call.kv_heads * call.capacity;
  const std::vector<float> qkv = reals(call.batch * call.rows * width), sinks = reals(call.q_heads);
  if (any(0, 1) == 0) call.sinks = sinks.data();
  Cache key, value;
  call.key = key.side(any(0, 1) ? 8 : 16, group, cache_rows, dim);
  call.value = value.side(any(0, 1) ? 8 : 16, group, cache_rows, dim);

  // The past, appended one row a sequence at a time.
  const Steps kernels = steps(isa(), call);
  Workspace memory;
  std::vector<float> row_qkv, row_y(call.batch * out_width);
  for (int64_t p = 0; p < call.capacity; p++) {
    Call append = call;
    append.rows = 1;
    row_qkv = reals(call.batch * width);
    for (int64_t b = 0; b < call.batch; b++) {
      single_past[b] = p;
      one[b] = p < past[b];
    }
    append.qkv = row_qkv.data();
    append.past = single_past.data();
    append.query = one.data();
    append.y = row_y.data();
    run(append, kernels, memory);
  }

  std::vector<float> y(call.batch * call.rows * out_width, NAN);
  call.qkv = qkv.data();
  call.past = past.data();
  call.query = query.data();
  call.y = y.data();
  run(call, kernels, memory);
  for (int64_t b = 0; b < call.batch; b++) {
    for (int64_t s = 0; s < call.rows; s++) {
      for (int h = 0; h < call.q_heads; h++) {
        if (s < query[b]) check_row(call, b, s, h);
      }
      if (s >= query[b]) CHECK(y[(b * call.rows + s) * out_width] == 0, "padding");
    }
  }

  // The same rows again, one at a time: the cache stays and every bit of y comes out again.
  const Cache key_before = key, value_before = value;
  for (int64_t s = 0; s < call.rows; s++) {
    Call single = call;
    single.rows = 1;
    row_qkv.resize(call.batch * width);
    for (int64_t b = 0; b < call.batch; b++) {
      std::memcpy(&row_qkv[b * width], &qkv[(b * call.rows + s) * width], width * sizeof(float));
      one[b] = s < query[b];
      single_past[b] = past[b] + s;
    }
    single.qkv = row_qkv.data();
    single.past = single_past.data();
    single.query = one.data();
    single.y = row_y.data();
    run(single, kernels, memory);
    for (int64_t b = 0; b < call.batch; b++) {
      CHECK(std::memcmp(&row_y[b * out_width], &y[(b * call.rows + s) * out_width], out_width * sizeof(float)) == 0,
            "b %d s %d of %d differs alone", int(b), int(s), int(call.rows));
    }
  }
  CHECK(key.levels == key_before.levels && key.halves == key_before.halves && key.scales == key_before.scales,
        "the key cache changed");
  CHECK(value.levels == value_before.levels && value.halves == value_before.halves &&
            value.scales == value_before.scales,
        "the value cache changed");
}

}  // namespace

void test_attention() {
  for (const char* name : {"portable", "avx2", "avx512_vnni", "amx"}) {
    if (!set_isa(name)) continue;
    for (int i = 0; i < 15; i++) {
      set_num_threads(1 + i % 3);
      check_case();
    }
  }
  set_isa("auto");
  set_num_threads(0);
}
