// Products of tiles of bfloat16, by Intel's matrix unit (AMX), where the machine has one: 16 rows, 16 outputs and 32 inputs
// are one instruction, of eight tile registers a thread. A row's sums do not depend on the other rows of its tile.
//
//   has_tiles()      whether this process may use them
//   TileShapes       keeps the registers in shape for as long as it lives, on its own thread; use(Shapes) says which
//   load_tile<I>, store_tile<I>, clear_tile<I>, multiply_tiles<C, A, B>; stream_tile<I>: loads what is not loaded again soon
//
// Of every output in one step: sums of the even and of the odd inputs, each in their order, both added, and that to the
// output's sum so far: other bits than those of dot_pairs (vectors.h).
//
// TANDEM_PRETEND_TILES, for tests, has the compiler's own code in place of the instructions: what is made of tiles is seen
// where there are none, and so is what it reads.
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
