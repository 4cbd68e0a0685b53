// The size of the matrix unit's tiles, and the part of each that is in use.
#pragma once

#include <cstdint>

namespace tandem {

constexpr int TILE_ROWS = 16;
constexpr int TILE_PAIRS = 16;  // pairs of inputs: the rows of a tile of weights, each with the pairs of 16 outputs
constexpr int TILE_ROW_BYTES = 64;
constexpr int NUM_TILES = 8;

// Rows of the eight tile registers, and bytes of each row, in the format of the instruction that configures them.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int num_rows, int num_bytes) { rows[tile] = uint8_t(num_rows), row_bytes[tile] = uint16_t(num_bytes); }
};

}  // namespace tandem
