// Products of bfloat16 tiles with Intel's matrix unit (AMX), if the machine has one: one instruction multiplies 16 rows
// by 16 outputs of 32 inputs; each thread has eight tile registers. A row's sums do not depend on the other rows of its
// tile.
//
//   has_tiles()      whether this process may use them
//   TileShapes       keeps the registers configured while it exists, on its own thread; use(Shapes) configures them
//   load_tile<I>, store_tile<I>, clear_tile<I>, multiply_tiles<C, A, B>; stream_tile<I>: loads data not reused soon
//
// In each step, each output adds its even inputs in order, its odd inputs in order, the two sums to each other, and the
// result to its sum so far: other bits than those of dot_pairs (vectors.h).
//
// TANDEM_PRETEND_TILES, for tests, replaces the instructions by plain C++: code that uses tiles, and its memory
// accesses, can then be checked on machines without them.
#pragma once

#if defined(TANDEM_PRETEND_TILES)
#define TANDEM_TILES 1
#include "tiles_pretended.h"
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__) && defined(__x86_64__)
#define TANDEM_TILES 1
#include "tiles_amx.h"
#else
#define TANDEM_TILES 0
#include "tile_shapes.h"
namespace tandem {
inline constexpr bool has_tiles() { return false; }
}  // namespace tandem
#endif
