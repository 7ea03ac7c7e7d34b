// Elementary functions of vectors, and of single numbers by way of them. Included after a file of vectors.

// Relative error about 1e-7 from -87 to 88; 0 below, NaN stays NaN.
static inline Vector exponential(Vector x) {
  const Vector n = round_even(min(splat(127), max(splat(-126), x * splat(1.44269504f))));
  const Vector r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  Vector p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1);
  return select_less(x, splat(-87.0f), splat(0), scale_by_power(p, n));
}

static inline float exponential(float x) {
  float out[kWidth];
  store(out, exponential(splat(x)));
  return out[0];
}

static inline Vector tangent(Vector x) {
  const Vector size = magnitude(x), square = x * x;
  Vector p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  const Vector small = fma(p * square, x, x);
  const Vector large = splat(1) - splat(2) / (exponential(min(splat(30), size + size)) + splat(1));
  return select_less(size, splat(0.625f), small, copy_sign(large, x));
}
