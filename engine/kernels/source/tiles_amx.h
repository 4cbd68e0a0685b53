// Implements tiles.h with AMX instructions. (GCC's intrinsics accept only literal tile numbers, and do not tell the
// compiler which memory they read.)
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "tile_shapes.h"

namespace tandem {

// Linux permits a process to use tiles only after it has asked for them.
inline bool has_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool may = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return may;
}

class TileShapes {
 public:
  TileShapes() = default;
  TileShapes(const TileShapes&) = delete;
  ~TileShapes() { asm volatile("tilerelease"); }  // otherwise every context switch saves the thread's tiles

  // Takes about 50 ns, and clears all tiles.
  static void use(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
};

// `stride`: bytes from row to row.
template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

// Loads with a hint not to keep the data in the L1 cache.
template <int TILE>
inline void stream_tile(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
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

}  // namespace tandem
