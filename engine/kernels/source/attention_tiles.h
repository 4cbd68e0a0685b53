// The two products of attention with the matrix unit (tiles.h): scores of rows against 16 keys per tile, and weights of
// 32 keys per step against 16 dims per tile. Rows are processed in tiles of equal height, configured once for each
// item. The last tile may extend beyond the existing rows, so the buffers that are read and written need room for
// TILE_ROWS more.
#pragma once

#include "tiles.h"

#if TANDEM_TILES

namespace tandem {

// Tiles 0 to 3 hold sums, 4 and 5 the rows and the keys or values of a whole step, 6 and 7 those of half a step.
inline Shapes attention_shapes(int64_t tile_rows) {
  Shapes shapes;
  for (int tile : {0, 1, 2, 3, 4}) shapes.set(tile, int(tile_rows), 64);
  shapes.set(5, TILE_PAIRS, 64);
  shapes.set(6, int(tile_rows), 32);
  shapes.set(7, TILE_PAIRS / 2, 64);
  return shapes;
}

inline int64_t tile_rows_of(int64_t num_rows) {
  int64_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
  return (num_rows + num_tiles - 1) / num_tiles;
}

// Scores of one tile of rows against tiles of 16 keys: score[row * stride + 16 j ..]. `keys_stride`: number of pairs
// between dim pairs.
template <int... J>
void score_rows_by_tiles(
    std::integer_sequence<int, J...>, const uint32_t* q, int64_t dim_pairs, const uint32_t* const* keys,
    int64_t keys_stride, float* score, int64_t stride) {
  const int64_t q_bytes = dim_pairs * 4, key_bytes = keys_stride * 4;
  (clear_tile<J>(), ...);
  int64_t d = 0;
  for (; d + TILE_PAIRS <= dim_pairs; d += TILE_PAIRS) {
    load_tile<4>(q + d, q_bytes);
    ((load_tile<5>(keys[J] + d * keys_stride, key_bytes), multiply_tiles<J, 4, 5>()), ...);
  }
  if (d < dim_pairs) {
    load_tile<6>(q + d, q_bytes);
    ((load_tile<7>(keys[J] + d * keys_stride, key_bytes), multiply_tiles<J, 6, 7>()), ...);
  }
  (store_tile<J>(score + J * LANES, stride * 4), ...);
}

// out[row, 16 ND dims] += sums over steps of 32 keys of p[row, key] * value[key]. values[h]: 16 pairs of keys, H dims each.
template <int... D>
void weigh_rows_by_tiles(
    std::integer_sequence<int, D...>, const uint32_t* p, int64_t p_stride, const uint32_t* const* values, int num_steps,
    int64_t H, int64_t first_dim, float* out) {
  (load_tile<D>(out + first_dim + D * LANES, H * 4), ...);
  for (int h = 0; h < num_steps; h++) {
    load_tile<4>(p + h * TILE_PAIRS, p_stride * 4);
    ((load_tile<5>(values[h] + first_dim + D * LANES, H * 4), multiply_tiles<D, 4, 5>()), ...);
  }
  (store_tile<D>(out + first_dim + D * LANES, H * 4), ...);
}

}  // namespace tandem

#endif
