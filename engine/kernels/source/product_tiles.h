// x @ weight.T by the matrix unit (tiles.h).
//
//   item    up to 256 rows and some panels: its rows' inputs stay in the L2 cache
//   part    of the inputs, where those of its rows would not fit; sums wait in memory for the next one
//   tile    up to 32 rows and one panel of 32 outputs: four products share two loads of inputs and two of weights
//
// All tiles of an item have as many rows, so that their shapes are set once; the last one begins earlier for it, and its
// first rows have been there already. However rows are shared out, each has the same sums: whole steps of 16 pairs, in
// their order, and the pairs that are left one after the other.
#pragma once

#include <array>
#include <vector>

#include "panels.h"
#include "read_ahead.h"
#include "tiles.h"

#if TANDEM_TILES

namespace tandem {

constexpr int64_t TILE_ITEM_ROWS = 256, TILE_PAIR_ROWS = 2 * TILE_ROWS;
constexpr int64_t PART_BYTES = 1 << 20;   // of inputs, beside panels, in a cache of 2 MB
constexpr int64_t PART_PANELS = 8;        // which share a part once it is there

// The sums of one tile's rows: 0 and 1 of its first half, 2 and 3 of its second; 4 and 5 inputs, 6 and 7 weights.
inline Shapes product_shapes(int64_t num_rows) {
  Shapes shapes;
  int first = int(num_rows > TILE_ROWS ? (num_rows + 1) / 2 : num_rows), second = int(num_rows) - first;
  for (int tile : {0, 1, 4}) shapes.set(tile, first, 64);
  for (int tile : {2, 3, 5}) shapes.set(tile, second ? second : 1, 64);
  for (int tile : {6, 7}) shapes.set(tile, TILE_PAIRS, 64);
  return shapes;
}

// Sums [rows, 32] of `steps` steps, beginning with what is there if `goes_on`. `second`: the rows before the second half.
// Meanwhile memory is asked for, LINES cache lines a pair: `ahead[i]` is its piece i.
template <bool HAS_SECOND, int LINES>
void multiply_steps(
    const uint32_t* x, int64_t row_pairs, int64_t second, int64_t steps, const PairsOfPanel& panel, const char* const* ahead,
    bool goes_on, float* sums) {
  constexpr int64_t STEPS_OF_PIECE = LINES ? ReadAhead::PIECE / ReadAhead::LINE / LINES / TILE_PAIRS : INT64_MAX / 2;
  constexpr int64_t SUMS_STRIDE = PANEL * sizeof(float), PANEL_STRIDE = PANEL * sizeof(uint32_t);
  const int64_t x_stride = row_pairs * int64_t(sizeof(uint32_t));
  const uint32_t* x_second = x + second * row_pairs;
  float* sums_second = sums + second * PANEL;
  if (goes_on) {
    load_tile<0>(sums, SUMS_STRIDE), load_tile<1>(sums + LANES, SUMS_STRIDE);
    if (HAS_SECOND) load_tile<2>(sums_second, SUMS_STRIDE), load_tile<3>(sums_second + LANES, SUMS_STRIDE);
  } else {
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  }
  panel.read([&](const auto& get) {
    for (int64_t i = 0; i < steps;) {
      const char* line = LINES ? *ahead++ : nullptr;
      for (int64_t end = std::min(steps, i + STEPS_OF_PIECE); i < end; i++) {
        const uint32_t* weights = get(i * TILE_PAIRS, TILE_PAIRS);
        for (int j = 0; j < LINES * TILE_PAIRS; j++, line += ReadAhead::LINE) __builtin_prefetch(line, 0, 2);
        load_tile<6>(weights, PANEL_STRIDE), load_tile<4>(x + i * TILE_PAIRS, x_stride);
        multiply_tiles<0, 4, 6>();
        load_tile<7>(weights + LANES, PANEL_STRIDE);
        multiply_tiles<1, 4, 7>();
        if (HAS_SECOND) {
          load_tile<5>(x_second + i * TILE_PAIRS, x_stride);
          multiply_tiles<2, 5, 6>();
          multiply_tiles<3, 5, 7>();
        }
      }
    }
  });
  store_tile<0>(sums, SUMS_STRIDE), store_tile<1>(sums + LANES, SUMS_STRIDE);
  if (HAS_SECOND) store_tile<2>(sums_second, SUMS_STRIDE), store_tile<3>(sums_second + LANES, SUMS_STRIDE);
}

using MultiplySteps = void (*)(const uint32_t*, int64_t, int64_t, int64_t, const PairsOfPanel&, const char* const*, bool, float*);
constexpr std::array<std::array<MultiplySteps, 3>, 2> MULTIPLY_STEPS = {{
    {multiply_steps<false, 0>, multiply_steps<false, 1>, multiply_steps<false, 2>},
    {multiply_steps<true, 0>, multiply_steps<true, 1>, multiply_steps<true, 2>},
}};

// Two vectors of sums += one row's `count` pairs, which fill no step.
inline void add_pairs(const uint32_t* x, const uint32_t* panel, int64_t count, F16* sums) {
  for (int64_t k = 0; k < count; k++)
    for (int i = 0; i < 2; i++) sums[i] = dot_pairs(sums[i], load<U16>(panel + k * PANEL + i * LANES), x[k]);
}

// How T rows of so many pairs, of which `steps` steps, are shared out.
struct TileSplit {
  int64_t num_row_blocks, steps_of_part, num_parts, panels_of_item;

  TileSplit(int64_t T, int64_t steps) {
    num_row_blocks = (T + TILE_ITEM_ROWS - 1) / TILE_ITEM_ROWS;
    int64_t step_bytes = (T + num_row_blocks - 1) / num_row_blocks * TILE_PAIRS * int64_t(sizeof(uint32_t));
    int64_t fewest = std::max<int64_t>(1, (steps * step_bytes + PART_BYTES - 1) / PART_BYTES);
    steps_of_part = std::max<int64_t>(1, (steps + fewest - 1) / fewest);
    num_parts = std::max<int64_t>(1, (steps + steps_of_part - 1) / steps_of_part);
    panels_of_item = num_parts > 1 ? PART_PANELS : 1;
  }
};

// An item's rows, in tiles of equal height; `second`: how many stand before a tile's second half, 0 if it has none.
struct TileRows {
  int64_t first, num, num_tiles, height, second;

  TileRows(int64_t begin, int64_t end) : first(begin), num(end - begin) {
    num_tiles = (num + TILE_PAIR_ROWS - 1) / TILE_PAIR_ROWS;
    height = (num + num_tiles - 1) / num_tiles;
    second = height > TILE_ROWS ? (height + 1) / 2 : 0;
  }

  int64_t begin_of(int64_t tile) const { return std::min(tile * height, num - height); }
};

// One thread's part of a product.
template <class Finish>
class TileMultiplier {
 public:
  TileMultiplier(const bf16* x, const Panels& weight, const TileSplit& split, ReadAhead* other, const Finish& finish)
      : x_(reinterpret_cast<const uint32_t*>(x)), weight_(weight), pairs_(weight.pairs), steps_(weight.pairs / TILE_PAIRS),
        split_(split), other_(other), finish_(finish),
        sums_((split.num_parts > 1 ? split.panels_of_item * TILE_ITEM_ROWS : 0) + 2 * TILE_PAIR_ROWS) {}

  // `is_next_ours`: whether the panel after the last of these is multiplied by this thread, too.
  void run_item(const TileRows& rows, int64_t first_panel, int64_t end_panel, bool is_next_ours) {
    if (rows.height != shaped_height_) TileShapes::use(product_shapes(shaped_height_ = rows.height));
    for (int64_t part = 0; part < split_.num_parts; part++)
      for (int64_t p = first_panel; p < end_panel; p++)
        multiply_panel(rows, p, p - first_panel, part, p + 1 < end_panel || (split_.num_parts == 1 && is_next_ours));
  }

 private:
  void multiply_panel(const TileRows& rows, int64_t p, int64_t place, int64_t part, bool is_next_ours) {
    const int64_t first_step = part * split_.steps_of_part, num_steps = std::min(split_.steps_of_part, steps_ - first_step);
    const int64_t first_pair = first_step * TILE_PAIRS, num_pairs = num_steps * TILE_PAIRS;
    const bool is_last = part + 1 == split_.num_parts;
    PairsOfPanel panel(weight_, p, first_pair, num_pairs, TILE_PAIRS, rows.num_tiles > 1, room_);
    PairsOfPanel left(weight_, p, steps_ * TILE_PAIRS, num_left(), num_left(), true, left_room_);
    for (int64_t i = 0; i < rows.num_tiles; i++) {
      std::array<F16, 2>* sums = sums_.data() + (split_.num_parts > 1 ? place * TILE_ITEM_ROWS + i * TILE_PAIR_ROWS : 0);
      if (!is_next_ours ||
          !asking_.next_panel(weight_.at(p + 1, first_pair), num_pairs, weight_.pair_bytes(), i, rows.num_tiles))
        asking_.others(rows.num_tiles > 2 ? other_ : nullptr, num_pairs);
      MULTIPLY_STEPS[rows.second > 0][asking_.lines](
          x_ + (rows.first + rows.begin_of(i)) * pairs_ + first_pair, pairs_, rows.second, num_steps, panel,
          asking_.pieces.data(), part > 0, reinterpret_cast<float*>(sums));
      if (is_last) left.read([&](const auto& get) { finish_tile(rows, i, p, get(0, num_left()), sums); });
      panel.narrow = left.narrow = nullptr;
    }
  }

  // The panel's pairs after its last step.
  int64_t num_left() const { return pairs_ - steps_ * TILE_PAIRS; }

  void finish_tile(const TileRows& rows, int64_t tile, int64_t p, const uint32_t* left, std::array<F16, 2>* sums) {
    for (int64_t r = tile * rows.height; r < std::min(rows.num, (tile + 1) * rows.height); r++) {
      F16* of_row = sums[r - rows.begin_of(tile)].data();
      add_pairs(x_ + (rows.first + r) * pairs_ + steps_ * TILE_PAIRS, left, num_left(), of_row);
      finish_(rows.first + r, p, of_row);
    }
  }

  const uint32_t* const x_;
  const Panels& weight_;
  const int64_t pairs_, steps_;
  const TileSplit& split_;
  ReadAhead* const other_;
  const Finish& finish_;
  std::vector<std::array<F16, 2>> sums_;
  std::vector<uint32_t> room_, left_room_;  // of what is widened
  Asking asking_;
  TileShapes shapes_;
  int64_t shaped_height_ = 0;
};

// Calls finish(row, panel, two vectors of sums) for all rows and panels.
template <class Finish>
void multiply_by_tiles(
    const bf16* x, int64_t T, const Panels& weight, ReadAhead* other, const Finish& finish) {
  if (T == 0) return;
  const int64_t num_panels = weight.num_panels;
  const TileSplit split(T, weight.pairs / TILE_PAIRS);
  const int64_t num_groups = (num_panels + split.panels_of_item - 1) / split.panels_of_item;
  for_each_range(split.num_row_blocks * num_groups, [&](int64_t begin, int64_t end) {
    TileMultiplier<Finish> multiplier(x, weight, split, other, finish);
    for (int64_t item = begin; item < end; item++) {
      int64_t block = item / num_groups, group = item % num_groups;
      TileRows rows(T * block / split.num_row_blocks, T * (block + 1) / split.num_row_blocks);
      int64_t first_panel = group * split.panels_of_item, end_panel = std::min(num_panels, first_panel + split.panels_of_item);
      multiplier.run_item(rows, first_panel, end_panel, item + 1 < end && group + 1 < num_groups);
    }
  });
}

}  // namespace tandem

#endif
