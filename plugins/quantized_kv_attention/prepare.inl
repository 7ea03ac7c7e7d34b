// Norm, RoPE and quantizing of one row of new tokens. Included after a file of vectors of eight.
// All order of operations is that of the channels: neither batch nor row count enter.

static_assert(kWidth == 8, "a head dimension is a multiple of 8");

// out = x / rms(x) * weight; x as it is without a weight.
static void norm(const float* x, const float* weight, float epsilon, int dim, float* out) {
  if (weight == nullptr) {
    __builtin_memcpy(out, x, sizeof(float) * dim);
    return;
  }
  Vector squares = splat(0);
  for (int d = 0; d < dim; d += kWidth) squares = fma(load(x + d), load(x + d), squares);
  const float factor = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(dim) + epsilon);
  for (int d = 0; d < dim; d += kWidth) store(out + d, load(x + d) * splat(factor) * load(weight + d));
}

static void rotate(float* x, const float* cos, const float* sin, int half, bool interleaved) {
  if (interleaved) {
    for (int i = 0; i < half; i++) {
      const float first = x[2 * i], second = x[2 * i + 1];
      x[2 * i] = first * cos[i] - second * sin[i];
      x[2 * i + 1] = second * cos[i] + first * sin[i];
    }
    return;
  }
  float* __restrict low = x;
  float* __restrict high = x + half;
  for (int i = 0; i < half; i++) {
    const float first = low[i], second = high[i];
    low[i] = first * cos[i] - second * sin[i];
    high[i] = second * cos[i] + first * sin[i];
  }
}

// One head's new row into the cache, at row index `at` of [B Hkv C].
static void append(const CacheSide& side, const float* x, int64_t at, int dim) {
  if (side.bits == 16) {
    uint16_t* row = static_cast<uint16_t*>(side.rows) + at * dim;
    for (int d = 0; d < dim; d += kWidth) {
      // What float16 has no number for becomes NaN, not infinity: an infinite key might get a weight of 0, silently.
      store_half(row + d, load(x + d));
      store_half(row + d, fma(load_half(row + d), splat(0), load(x + d)));
    }
    return;
  }
  int8_t* row = static_cast<int8_t*>(side.rows) + at * dim;
  uint16_t* scales = side.scales + at * (dim / side.group_size);
  for (int first = 0; first < dim; first += side.group_size) {
    const int end = first + side.group_size;
    // max() drops NaN; the product with 0 does not.
    Vector largest = splat(0), poison = splat(0);
    for (int d = first; d < end; d += kWidth) {
      largest = max(magnitude(load(x + d)), largest);
      poison = fma(load(x + d), splat(0), poison);
    }
    const uint16_t scale = float_to_half((maximum(largest) + sum(poison)) / 127.0f);
    scales[first / side.group_size] = scale;
    const float step = half_to_float(scale);
    if (!(step > 0)) {  // 0 or NaN.
      __builtin_memset(row + first, 0, side.group_size);
      continue;
    }
    for (int d = first; d < end; d += kWidth) {
      const Vector level = round_even(load(x + d) / splat(step));
      store_int8(row + d, max(min(level, splat(127)), splat(-127)));
    }
  }
}

static void prepare(const Call& call, int64_t b, int64_t s, float* queries) {
  const int dim = call.head_dim, heads = call.q_heads + 2 * call.kv_heads;
  const float* row = call.qkv + (b * call.rows + s) * heads * static_cast<int64_t>(dim);
  const int64_t position = call.past[b] + s;
  const float* cos = call.cos == nullptr ? nullptr : call.cos + position * call.rotary_half;
  const float* sin = call.sin == nullptr ? nullptr : call.sin + position * call.rotary_half;
  for (int h = 0; h < call.q_heads; h++) {
    const int64_t kv_head = h / call.repeats, place = ((b * call.kv_heads + kv_head) * call.rows + s) * call.repeats;
    float* q = queries + (place + h % call.repeats) * dim;
    norm(row + static_cast<int64_t>(h) * dim, call.q_norm, call.epsilon, dim, q);
    if (cos != nullptr) rotate(q, cos, sin, call.rotary_half, call.interleaved);
  }
  alignas(64) float k[kMaxHeadDim];
  for (int h = 0; h < call.kv_heads; h++) {
    const int64_t at = (b * call.kv_heads + h) * call.capacity + position;
    norm(row + static_cast<int64_t>(call.q_heads + h) * dim, call.k_norm, call.epsilon, dim, k);
    if (cos != nullptr) rotate(k, cos, sin, call.rotary_half, call.interleaved);
    append(call.key, k, at, dim);
    append(call.value, row + static_cast<int64_t>(call.q_heads + call.kv_heads + h) * dim, at, dim);
  }
}
