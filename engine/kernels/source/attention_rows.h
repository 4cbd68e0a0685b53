// The rows of attention while they are computed: the softmax of some keys, and how pieces of keys are combined.
#pragma once

#include <vector>

#include "attention_pairs.h"
#include "attention_tiles.h"
#include "vectors.h"

namespace tandem {

constexpr int64_t MAX_ROWS = 96;                   // rows of one work item; they stay in the L2 cache
constexpr int64_t PIECE_KEYS = 8 * KEYS;           // keys of a piece; each has a softmax of its own, combined later
constexpr float MASKED = -1e30f;                   // finite, so that a row with only masked keys so far stays finite
constexpr float HEADROOM = 8;                      // weights are at most 2^8: see `Attention::soften`

// Memory aligned to a cache line: a vector that spans two lines takes twice as long.
template <class T>
struct InLines : std::allocator<T> {
  template <class U>
  struct rebind {
    using other = InLines<U>;
  };
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
};
template <class T>
using Numbers = std::vector<T, InLines<T>>;

// The softmax of some keys and the sum of values weighted by it: `out` must still be divided by `sum`. The weight of a
// key is 2 to the power of its score (scaled by `Attention::scale`) minus the row's `base`.
struct Rows {
  Numbers<float> out, base, sum;
  Rows(int64_t num_rows, int64_t V) : out(num_rows * V), base(num_rows), sum(num_rows) {}
  void clear(int64_t num_rows, int64_t V) {
    std::fill_n(out.data(), num_rows * V, 0.0f);
    std::fill_n(base.data(), num_rows, MASKED);
    std::fill_n(sum.data(), num_rows, 0.0f);
  }
  void take(int64_t at, const Rows& from, int64_t from_at, int64_t V) {
    std::memcpy(out.data() + at * V, from.out.data() + from_at * V, V * sizeof(float));
    base[at] = from.base[from_at];
    sum[at] = from.sum[from_at];
  }
};

inline int64_t end_of_piece(int64_t key) { return (key / PIECE_KEYS + 1) * PIECE_KEYS; }

// Combines row `from_at` of `from` into row `at` of `to`, which then covers the keys of both. Not inlined, so that its
// bits are the same everywhere.
__attribute__((noinline)) void put_together(Rows& to, int64_t at, const Rows& from, int64_t from_at, int64_t V) {
  float base = std::max(to.base[at], from.base[from_at]);
  float keep = exp2_of(to.base[at] - base), add = exp2_of(from.base[from_at] - base);
  to.base[at] = base;
  to.sum[at] = to.sum[at] * keep + from.sum[from_at] * add;
  float* out = to.out.data() + at * V;
  const float* more = from.out.data() + from_at * V;
#pragma omp simd
  for (int64_t d = 0; d < V; d++) out[d] = out[d] * keep + more[d] * add;
}

// Adds the sink to a row's sum. Not inlined, so that its bits are the same everywhere.
__attribute__((noinline)) inline float sum_with(float sink, float sum, float base) {
  return sum + exp2_of(sink * LOG2_E - base);
}

// Buffers of one thread. Online softmax: M. Milakov, N. Gimelshein, 2018; tiled as in T. Dao, "FlashAttention-2", 2023.
struct Scratch {
  Numbers<uint32_t> q, p, values;
  Numbers<float> score, sums;  // sums [row, lane] of a piece's weights
  Rows piece, whole;
  Scratch(int64_t H, int64_t V)
      : q((MAX_ROWS + TILE_ROWS) * H / 2), p((MAX_ROWS + TILE_ROWS) * KEYS / 2), values(KEYS / 2 * V),
        score((MAX_ROWS + TILE_ROWS) * KEYS), sums(MAX_ROWS * REGISTER), piece(MAX_ROWS + TILE_ROWS, V), whole(MAX_ROWS, V) {}
};

}  // namespace tandem
