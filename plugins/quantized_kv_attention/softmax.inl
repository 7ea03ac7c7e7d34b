// The softmax over a chunk of scores. Included after functions.inl. Scores are in units of ln 2 from here on: weights
// are powers of two.

constexpr float kLog2E = 1.44269504f;

// Scores times `factor` of positions [first, end) of a chunk become weights 2^(score - maximum), other positions' become
// 0 as far as vectors reach; `denominator` gets their sum. `factor` leads to natural units before a softcap, and to
// those of ln 2 without one.
static void soften(float softcap, float factor, float* scores, int first, int end, float* maximum_out,
                   float* denominator_out) {
  const int from = first / kWidth * kWidth, to = (end + kWidth - 1) / kWidth * kWidth;
  for (int i = from; i < to; i += kWidth) {
    Vector score = load(scores + i) * splat(factor);
    if (softcap > 0) score = tangent(score / splat(softcap)) * splat(softcap * kLog2E);
    store(scores + i, score);
  }
  for (int i = from; i < first; i++) scores[i] = -__builtin_inff();
  for (int i = end; i < to; i++) scores[i] = -__builtin_inff();
  Vector largest = splat(-__builtin_inff());  // Without NaN, which the sum keeps.
  for (int i = from; i < to; i += kWidth) largest = max(load(scores + i), largest);
  const float top = maximum(largest);
  Vector total = splat(0);
  for (int i = from; i < to; i += kWidth) {
    const Vector weight = power_of_two(load(scores + i) - splat(top));
    store(scores + i, weight);
    total = total + weight;
  }
  *maximum_out = top;
  *denominator_out = sum(total);
}

// What takes sums of products to the scores that soften() expects.
static inline float score_factor(const Call& call) { return call.softcap > 0 ? call.scale : call.scale * kLog2E; }
