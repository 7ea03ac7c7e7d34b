// Eight floats in plain C++ (GCC vector extension). Included inside a namespace, without target options.

constexpr int kWidth = 8;
constexpr int kKeyVectors = 2;  // Vectors of keys, or of channels, that a tile of kTileRows rows keeps in registers.
constexpr int kTileRows = 2;

typedef float Vector __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(32), aligned(4), may_alias));

static inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static inline void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }
static inline Vector splat(float x) { return Vector{x, x, x, x, x, x, x, x}; }
static inline Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
// Where either is NaN: b.
static inline Vector max(Vector a, Vector b) { return a > b ? a : b; }
static inline Vector min(Vector a, Vector b) { return a < b ? a : b; }
static inline Vector magnitude(Vector a) { return (Vector)((Integers)a & 0x7fffffff); }
static inline Vector copy_sign(Vector a, Vector sign) {
  return (Vector)(((Integers)a & 0x7fffffff) | ((Integers)sign & static_cast<int32_t>(0x80000000)));
}
// x < limit ? yes : no; NaN takes no.
static inline Vector select_less(Vector x, Vector limit, Vector yes, Vector no) { return x < limit ? yes : no; }
// Half to even, for |a| < 2^22.
static inline Vector round_even(Vector a) {
  const Vector magic = splat(12582912.0f);
  return (a + magic) - magic;
}
// p 2^n for n a whole number in [-126, 127].
static inline Vector scale_by_power(Vector p, Vector n) {
  Integers bits;
  // NaN has no integer; any will do, since p is NaN too.
  for (int i = 0; i < kWidth; i++) bits[i] = n[i] >= -126.0f && n[i] <= 127.0f ? static_cast<int32_t>(n[i]) : 0;
  return p * (Vector)((bits + 127) << 23);
}
static inline float sum(Vector v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
static inline float maximum(Vector v) {
  float m = v[0];
  for (int i = 1; i < kWidth; i++) m = v[i] > m ? v[i] : m;
  return m;
}

static inline Vector load_int8(const int8_t* p) {
  Vector v;
  for (int i = 0; i < kWidth; i++) v[i] = p[i];
  return v;
}
static inline Vector load_half(const uint16_t* p) {
  Vector v;
  for (int i = 0; i < kWidth; i++) v[i] = half_to_float(p[i]);
  return v;
}
// The first eight, which here are all.
static inline Vector load_eight_int8(const int8_t* p) { return load_int8(p); }
static inline Vector load_eight_half(const uint16_t* p) { return load_half(p); }
static inline void store_eight(float* p, Vector v) { store(p, v); }
// Whole numbers in [-127, 127].
static inline void store_int8(int8_t* p, Vector v) {
  for (int i = 0; i < kWidth; i++) p[i] = static_cast<int8_t>(static_cast<int>(v[i]));
}
static inline void store_half(uint16_t* p, Vector v) {
  for (int i = 0; i < kWidth; i++) p[i] = float_to_half(v[i]);
}

// Channels [0, dim) of `count` <= kWidth rows: keys[d * kBlock + row] = element * scales[d / group * kBlock + row].
// Rows from `count` on become 0, as their scales are.
static inline void transpose_int8(const int8_t* rows, int count, int dim, const float* scales, int group, float* keys) {
  for (int d = 0; d < dim; d++) {
    const float* scale = scales + d / group * kBlock;
    for (int i = 0; i < kWidth; i++)
      keys[d * kBlock + i] = i < count ? rows[static_cast<int64_t>(i) * dim + d] * scale[i] : 0.0f;
  }
}
static inline void transpose_half(const uint16_t* rows, int count, int dim, float* keys) {
  for (int d = 0; d < dim; d++) {
    for (int i = 0; i < kWidth; i++)
      keys[d * kBlock + i] = i < count ? half_to_float(rows[static_cast<int64_t>(i) * dim + d]) : 0.0f;
  }
}
