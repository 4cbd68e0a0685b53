// Products of tiles of bfloat16, by Intel's matrix unit (AMX), where the machine has one: 16 rows, 16 outputs and 32 inputs
// are one instruction, of eight tile registers a thread. A row's sums do not depend on the other rows of its tile.
//
//   has_tiles()      whether this process may use them: Linux gives the right when asked, once
//   TileShapes       which rows and bytes each register has, for as long as it lives, on its own thread
//   load_tile<I>, store_tile<I>, clear_tile<I>, multiply_tiles<C, A, B>
//
// Of every output in one step: sums of the even and of the odd inputs, each in their order, both added, and that to the
// output's sum so far: other bits than those of dot_pairs (vectors.h).
#pragma once

#include "vectors.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__) && defined(__x86_64__)
#define TANDEM_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define TANDEM_TILES 0
#endif

namespace tandem {

constexpr int TILE_ROWS = 16;
constexpr int TILE_PAIRS = 16;  // of inputs: as many rows has a tile of weights, each of 16 outputs' pairs

#if TANDEM_TILES

inline bool has_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool may = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return may;
}

class TileShapes {
 public:
  // As the instruction wants it.
  struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int num_rows, int num_bytes) { rows[tile] = uint8_t(num_rows), row_bytes[tile] = uint16_t(num_bytes); }
  };

  // Takes about 50 ns and clears all tiles. (GCC's own intrinsics know numbers of tiles only as they stand in the text, and
  // do not tell what they read.)
  static void use(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
  TileShapes() = default;
  TileShapes(const TileShapes&) = delete;
  ~TileShapes() { asm volatile("tilerelease"); }  // else the thread's tiles are saved whenever it is interrupted
};

// `stride`: bytes from row to row.
template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// C += A B
template <int C, int A, int B>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

inline constexpr bool has_tiles() { return false; }

#endif

}  // namespace tandem
