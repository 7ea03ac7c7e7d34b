// Elementary functions of vectors, and of single numbers by way of them. Included after a file of vectors.

// 2^x for x up to 127: relative error below 2e-7, 0 below 2^-126, NaN stays NaN. 2^0 is 1 exactly.
static inline Vector power_of_two(Vector x) {
  const Vector n = round_even(max(splat(-126), x));
  const Vector r = x - n;
  Vector p = splat(1.326472731307149e-3f);  // Least largest relative error on [-1/2, 1/2].
  p = fma(p, r, splat(9.671512991189957e-3f));
  p = fma(p, r, splat(5.550733581185341e-2f));
  p = fma(p, r, splat(2.402224242687225e-1f));
  p = fma(p, r, splat(6.931470036506653e-1f));
  p = fma(p, r, splat(1));
  return select_less(x, splat(-126), splat(0), scale_by_power(p, n));
}

static inline float power_of_two(float x) {
  float out[kWidth];
  store(out, power_of_two(splat(x)));
  return out[0];
}

// Channels as far as vectors reach; a row's memory reaches as far.
static inline int lanes(int dim) { return (dim + kWidth - 1) / kWidth * kWidth; }

static inline Vector tangent(Vector x) {
  const Vector size = magnitude(x), square = x * x;
  Vector p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  const Vector small = fma(p * square, x, x);
  const Vector squared = power_of_two(min(splat(30), size) * splat(2.88539008f));  // e^(2 |x|)
  const Vector large = splat(1) - splat(2) / (squared + splat(1));
  return select_less(size, splat(0.625f), small, copy_sign(large, x));
}
