// Implements tiles.h without a matrix unit: each instruction as Intel's manual defines it (Intel 64 and IA-32
// Architectures Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBF16PS), except
// that subnormal numbers are not flushed to zero. Whatever the unit would refuse is an error.
#pragma once

#include <cstring>

#include "tile_shapes.h"
#include "vectors.h"

namespace tandem {

inline constexpr bool has_tiles() { return true; }

struct PretendedTiles {
  bool are_shaped = false;
  Shapes shapes;
  U16 rows[NUM_TILES][TILE_ROWS];  // zeros beyond a row's bytes and a tile's rows
};

inline PretendedTiles& tiles_of_thread() {
  thread_local PretendedTiles tiles;
  return tiles;
}

inline PretendedTiles& shaped_tiles() {
  PretendedTiles& tiles = tiles_of_thread();
  TORCH_CHECK(tiles.are_shaped, "a tile is used that has no shape");
  return tiles;
}

class TileShapes {
 public:
  TileShapes() = default;
  TileShapes(const TileShapes&) = delete;
  ~TileShapes() { tiles_of_thread().are_shaped = false; }

  static void use(const Shapes& shapes) {
    for (int tile = 0; tile < NUM_TILES; tile++)
      TORCH_CHECK(
          shapes.rows[tile] <= TILE_ROWS && shapes.row_bytes[tile] <= TILE_ROW_BYTES && !shapes.rows[tile] == !shapes.row_bytes[tile],
          "no such tile: ", int(shapes.rows[tile]), " rows of ", shapes.row_bytes[tile], " bytes");
    PretendedTiles& tiles = tiles_of_thread();
    tiles.are_shaped = true, tiles.shapes = shapes;
    std::memset(tiles.rows, 0, sizeof(tiles.rows));
  }
};

template <int TILE>
inline void clear_tile() {
  PretendedTiles& tiles = shaped_tiles();
  TORCH_CHECK(tiles.shapes.rows[TILE] > 0, "a tile is used that has no rows");
  std::memset(tiles.rows[TILE], 0, sizeof(tiles.rows[TILE]));
}

// `stride`: bytes from row to row.
template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
  clear_tile<TILE>();
  PretendedTiles& tiles = shaped_tiles();
  for (int r = 0; r < tiles.shapes.rows[TILE]; r++)
    std::memcpy(&tiles.rows[TILE][r], static_cast<const char*>(from) + r * stride, tiles.shapes.row_bytes[TILE]);
}

template <int TILE>
inline void stream_tile(const void* from, int64_t stride) {
  load_tile<TILE>(from, stride);
}

template <int TILE>
inline void store_tile(void* to, int64_t stride) {
  PretendedTiles& tiles = shaped_tiles();
  TORCH_CHECK(tiles.shapes.rows[TILE] > 0, "a tile is used that has no rows");
  for (int r = 0; r < tiles.shapes.rows[TILE]; r++)
    std::memcpy(static_cast<char*>(to) + r * stride, &tiles.rows[TILE][r], tiles.shapes.row_bytes[TILE]);
}

// C += A B
template <int C, int A, int B>
inline void multiply_tiles() {
  static_assert(C != A && A != B && B != C);
  PretendedTiles& tiles = shaped_tiles();
  const Shapes& shapes = tiles.shapes;
  TORCH_CHECK(
      shapes.rows[C] == shapes.rows[A] && shapes.row_bytes[A] == shapes.rows[B] * 4 && shapes.row_bytes[B] == shapes.row_bytes[C],
      "tiles that do not fit: ", int(shapes.rows[C]), "x", shapes.row_bytes[C], " += ", int(shapes.rows[A]), "x",
      shapes.row_bytes[A], " by ", int(shapes.rows[B]), "x", shapes.row_bytes[B]);
  for (int r = 0; r < shapes.rows[C]; r++) {
    F16 even{}, odd{};
    for (int k = 0; k < shapes.rows[B]; k++) {
      uint32_t pair = tiles.rows[A][r][k];
      even += (F16)(tiles.rows[B][k] << 16) * to_float(bf16(pair));
      odd += (F16)(tiles.rows[B][k] & 0xffff0000u) * to_float(bf16(pair >> 16));
    }
    tiles.rows[C][r] = (U16)((F16)tiles.rows[C][r] + (even + odd));
  }
}

}  // namespace tandem
