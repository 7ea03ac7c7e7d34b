#include "quantized_linear/linear.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#include "cpu_features.h"
#include "thread_pool.h"

#define SPECEXPORT_KERNEL_SOURCE "quantized_linear/kernels.inl"
#include "for_each_isa.h"

namespace specexport {
namespace {

const LinearKernels& kernels() {
  switch (isa()) {
#if defined(__x86_64__)
    case Isa::kAmx:
    case Isa::kAvx512Vnni:
      return avx512_vnni::kLinearKernels;
    case Isa::kAvx2:
      return avx2::kLinearKernels;
#endif
    default:
      return portable::kLinearKernels;
  }
}

// Memory of the calling thread that grows to what its largest call needs and is then kept.
class Scratch {
 public:
  uint8_t* reserve(size_t bytes) {
    if (bytes > size_) {
      data_.reset();
      size_ = 0;
      const size_t rounded = (bytes + 4095) / 4096 * 4096;
      void* data = std::aligned_alloc(64, rounded);
      if (data == nullptr) throw std::bad_alloc();
      data_.reset(static_cast<uint8_t*>(data));
      size_ = rounded;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(uint8_t* data) const { std::free(data); }
  };
  std::unique_ptr<uint8_t, Free> data_;
  size_t size_ = 0;
};

// What a thread must have to do before another one is worth waking: values to prepare, and bytes of tiles to read.
constexpr int64_t kValuesPerThread = 8192;
constexpr int64_t kBytesPerThread = 16384;

}  // namespace

void run_linear(const LinearConfig& config, const LinearTensors& tensors) {
  static thread_local Scratch scratch;
  const LinearKernels& run = kernels();
  const int64_t k = config.in_features;
  for (int64_t first = 0; first < tensors.rows; first += kRowsAtOnce) {
    PreparedRows rows;
    rows.first = first;
    rows.count = std::min<int64_t>(kRowsAtOnce, tensors.rows - first);
    if (config.quantizes_activations()) {
      const size_t integer_bytes = (rows.count * k * config.planes() + 63) / 64 * 64;
      uint8_t* memory = scratch.reserve(integer_bytes + rows.count * rows.scales_per_row(config) * sizeof(float));
      rows.integers = reinterpret_cast<int8_t*>(memory);
      rows.scales = reinterpret_cast<float*>(memory + integer_bytes);
    } else if (config.norm != Norm::kNone) {
      rows.reals = reinterpret_cast<float*>(scratch.reserve(rows.count * k * sizeof(float)));
    }
    if (config.quantizes_activations() || config.norm != Norm::kNone) {
      // By whole blocks: the rows of one share cache lines, which two threads would take from each other.
      parallel_for((rows.count + kRowBlock - 1) / kRowBlock, std::max<int64_t>(1, kValuesPerThread / (kRowBlock * k)),
                   [&](int64_t begin, int64_t end) {
                     run.prepare(config, tensors, rows, begin * kRowBlock, std::min(end * kRowBlock, rows.count));
                   });
    }
    const int64_t unit_bytes = 2 * config.tile_bytes() * ((rows.count + kRowBlock - 1) / kRowBlock);
    parallel_for(config.units(), std::max<int64_t>(1, kBytesPerThread / unit_bytes),
                 [&](int64_t begin, int64_t end) { run.multiply(config, tensors, rows, begin, end); });
  }
}

}  // namespace specexport
