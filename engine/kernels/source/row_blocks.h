// How products of pairs cut up rows: tiles of MATMUL_ROWS, blocks of sixteen tiles.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tandem {

#if defined(__AVX512F__)
constexpr int MATMUL_ROWS = 12;  // rows that share a load of weights: their sums fill the registers
#else
constexpr int MATMUL_ROWS = 3;
#endif
constexpr int64_t ROWS_OF_ITEM = 16 * MATMUL_ROWS;

// Calls work(R) with a compile-time number of rows, from R to MOST.
template <int R, int MOST, class Work>
void with_rows(int64_t rows, const Work& work) {
  if (rows == R) return work(std::integral_constant<int, R>());
  if constexpr (R < MOST) with_rows<R + 1, MOST>(rows, work);
}

// Blocks of rows; an item is one of them and one panel.
inline int64_t row_blocks_of(int64_t T) { return (T + ROWS_OF_ITEM - 1) / ROWS_OF_ITEM; }

}  // namespace tandem
