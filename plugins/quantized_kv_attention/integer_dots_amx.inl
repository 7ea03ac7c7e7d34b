// Sums of products of bytes with AMX tiles: up to kTile rows, kTile keys or channels, and 64 bytes deep. Integers are
// exact, so the sums are those of integer_dots_vnni.inl. Included after integer_planes.inl.

// The registers: sums of the three planes, their left factors, and the right factor.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

class Dots {
 public:
  static constexpr int kFlip = 0;  // Both factors have signs.

  // Tiles are as deep as groups of keys allow.
  explicit Dots(int key_group_size) : depth_(key_group_size % 64 == 0 ? 64 : key_group_size % 32 == 0 ? 32 : 16) {}
  Dots(const Dots&) = delete;
  Dots& operator=(const Dots&) = delete;
  ~Dots() { _tile_release(); }

  void set_rows(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    TileShapes shapes;
    for (int i = 0; i < 2 * kPlanes; i++) {
      shapes.rows[i] = static_cast<uint8_t>(rows);
      shapes.row_bytes[i] = static_cast<uint16_t>(i < kPlanes ? 64 : depth_);
    }
    shapes.rows[6] = static_cast<uint8_t>(depth_ / 4);
    shapes.row_bytes[6] = 64;
    asm volatile("" ::: "memory");
    _tile_loadconfig(&shapes);
  }

  // dots[plane][row][key] of channels [first, end) of a tile of rows with a tile of keys. `same_queries`: those of the
  // call before.
  void score(const int8_t* queries, const int32_t* /*query_sums*/, const uint8_t* keys, int first, int end, int dim,
             bool same_queries, int32_t* dots) const {
    asm volatile("" ::: "memory");  // The intrinsics do not say that they read it.
    const int plane = kTile * dim;
    zero();
    for (int d = first; d < end; d += depth_) {
      if (!same_queries || depth_ != dim) {
        _tile_loadd(3, queries + d, dim);
        _tile_loadd(4, queries + plane + d, dim);
        _tile_loadd(5, queries + 2 * plane + d, dim);
      }
      _tile_loadd(6, keys + d * kTile, 64);
      _tile_dpbssd(0, 3, 6);
      _tile_dpbssd(1, 4, 6);
      _tile_dpbssd(2, 5, 6);
    }
    store_sums(dots);
  }

  // dots[plane][row][channel] of a tile of rows with a tile of channels, over `blocks` blocks of keys.
  void weigh(const uint8_t* weights, const int8_t* values, int blocks, int dim, int32_t* dots) const {
    asm volatile("" ::: "memory");
    constexpr int kPlane = kTile * kChunk;
    zero();
    for (int block = 0; block < blocks; block++, weights += kBlock, values += kBlock * dim) {
      for (int i = 0; i < kBlock; i += depth_) {
        _tile_loadd(6, values + i * kTile, 64);
        _tile_loadd(3, weights + i, kChunk);
        _tile_loadd(4, weights + kPlane + i, kChunk);
        _tile_loadd(5, weights + 2 * kPlane + i, kChunk);
        _tile_dpbusd(0, 3, 6);
        _tile_dpbusd(1, 4, 6);
        _tile_dpbusd(2, 5, 6);
      }
    }
    store_sums(dots);
  }

 private:
  static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
  }
  static void store_sums(int32_t* dots) {
    _tile_stored(0, dots, 64);
    _tile_stored(1, dots + kTile * kTile, 64);
    _tile_stored(2, dots + 2 * kTile * kTile, 64);
    asm volatile("" ::: "memory");
  }

  const int depth_;
  int rows_ = 0;
};
