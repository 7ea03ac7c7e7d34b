// Runs a checked call over the threads: which rows and chunks go together. None of it changes a bit of the result.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>

#include "quantized_kv_attention/attention_call.h"
#include "quantized_kv_attention/scratch.h"
#include "thread_pool.h"

namespace specexport::attention {

// What a calling thread keeps between calls, so that a call allocates nothing once it has seen its largest.
struct Workspace {
  Buffer<float> queries, sums, maxima, denominators;
  Buffer<char> scratch;
  Buffer<int> unfinished;
  Buffer<Item> items;
};

constexpr int kItemRows = 96;          // Query rows (heads times positions) that share a dequantized block.
constexpr int64_t kSerialRows = 8;     // So few new rows are prepared sooner than threads are woken.
constexpr int64_t kSerialWork = 1 << 17;  // Likewise so few multiplications, about 10 microseconds.
constexpr int64_t kCopyGrain = 1 << 16;

inline void prepare_rows(const Call& call, const Steps& steps, float* queries) {
  const auto body = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t b = i / call.rows, s = i % call.rows;
      if (s < call.query[b]) {
        steps.prepare(call, b, s, queries);
      } else {
        const int64_t width = static_cast<int64_t>(call.q_heads) * call.head_dim;
        std::fill_n(call.y + i * width, width, 0.0f);
      }
    }
  };
  const int64_t rows = call.batch * call.rows;
  if (rows <= kSerialRows) {
    body(0, rows);
  } else {
    parallel_for(rows, 4, body);
  }
}

// A cache that is not written in place is copied first.
inline void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (to == from || bytes == 0) return;
  parallel_for((bytes + kCopyGrain - 1) / kCopyGrain, 16, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kCopyGrain, last = std::min(bytes, end * kCopyGrain);
    std::memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first, last - first);
  });
}

inline void run(const Call& call, const Steps& steps, Workspace& memory) {
  const int threads = num_threads(), padded = call.padded_dim();
  const int64_t positions = std::max(1, kItemRows / call.repeats);  // Of one item.
  const int item_rows = static_cast<int>(std::min(positions, std::max<int64_t>(call.rows, 1))) * call.repeats;
  const int64_t row_blocks = (call.rows + positions - 1) / positions, heads = call.batch * call.kv_heads;
  float* queries = memory.queries.reserve(call.batch * call.rows * call.q_heads * call.head_dim);
  prepare_rows(call, steps, queries);

  // Few rows and few heads: threads share a head's chunks. Else an item walks its chunks itself.
  const bool spread = row_blocks <= 1 && threads > 1 && heads < 8 * threads;
  const int64_t chunks = (call.capacity + kChunk - 1) / kChunk;
  Item* items = memory.items.reserve(heads * (spread ? chunks : row_blocks));
  int64_t count = 0;
  Partials partials;
  int64_t most_chunks = 0, work = 0;
  for (int64_t block = row_blocks - 1; block >= 0; block--) {  // Late rows attend the most: they come first.
    for (int64_t b = 0; b < call.batch; b++) {
      Item item;
      item.b = b;
      item.s0 = block * positions;
      item.s1 = std::min(item.s0 + positions, call.query[b]);
      if (item.s0 >= item.s1) continue;
      item.first = first_position(call, call.past[b] + item.s0) / kChunk;
      item.last = (call.past[b] + item.s1 - 1) / kChunk;
      most_chunks = std::max(most_chunks, item.last + 1);
      // Dequantizing a key costs about what four query rows do.
      work += (call.past[b] + item.s1 - item.first * kChunk) * call.kv_heads * call.head_dim * (item_rows + 4);
      for (item.kv_head = 0; item.kv_head < call.kv_heads; item.kv_head++) {
        if (!spread) {
          items[count++] = item;
          continue;
        }
        for (int64_t chunk = item.first; chunk <= item.last; chunk++) {
          items[count] = item;
          items[count].first = items[count].last = chunk;
          count++;
        }
      }
    }
  }
  if (spread) {
    partials.rows = item_rows;
    partials.chunks = most_chunks;
    partials.unfinished = memory.unfinished.reserve(heads);
    partials.maxima = memory.maxima.reserve(heads * item_rows * most_chunks);
    partials.denominators = memory.denominators.reserve(heads * item_rows * most_chunks);
    partials.sums = memory.sums.reserve(heads * item_rows * most_chunks * padded);
    std::fill_n(partials.unfinished, heads, 0);
    for (int64_t i = 0; i < count; i++) partials.unfinished[items[i].b * call.kv_heads + items[i].kv_head]++;
  }

  const int64_t workers = work < kSerialWork ? std::min<int64_t>(count, 1) : std::min<int64_t>(threads, count);
  const size_t size = Scratch(nullptr, call, item_rows).bytes;
  char* scratch = memory.scratch.reserve(size * workers);
  std::atomic<int64_t> next{0};
  parallel_for(workers, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; worker++) {
      const Scratch mine(scratch + size * worker, call, item_rows);
      for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
        if (spread) {
          steps.attend_chunk(call, items[i], queries, mine, partials);
        } else {
          steps.attend(call, items[i], queries, mine);
        }
      }
    }
  });
}

}  // namespace specexport::attention
