// x @ weight.T by the matrix unit (tiles.h).
//
//   item    up to 256 rows and some panels: the inputs of its rows stay in the L2 cache
//   part    a range of the inputs, if all inputs of the rows would not fit; sums wait in memory for the next part
//   tile    up to 32 rows and one panel of 32 outputs: four products share two loads of inputs and two of weights
//
// All tiles of an item have the same number of rows, so that tile shapes are configured once. For this, the last tile
// begins earlier, and its first rows repeat rows of the tile before. Each row has the same sums however rows are
// distributed: whole steps of 16 pairs in order, and then the remaining pairs one after the other.
#pragma once

#include <array>
#include <vector>

#include "panels.h"
#include "tiles.h"

#if TANDEM_TILES

namespace tandem {

constexpr int64_t TILE_ITEM_ROWS = 256, TILE_PAIR_ROWS = 2 * TILE_ROWS;
constexpr int64_t PART_BYTES = 1 << 20;   // inputs of one part; fits in a 2 MB cache beside panels
constexpr int64_t PART_PANELS = 8;        // panels that share a part once it is in the cache
constexpr int64_t CACHE_LINE = 64;

// Tiles 0 and 1 hold the sums of the first half of the rows, 2 and 3 those of the second; 4 and 5 inputs, 6 and 7
// weights.
inline Shapes product_shapes(int64_t num_rows) {
  Shapes shapes;
  int first = int(num_rows > TILE_ROWS ? (num_rows + 1) / 2 : num_rows), second = int(num_rows) - first;
  for (int tile : {0, 1, 4}) shapes.set(tile, first, 64);
  for (int tile : {2, 3, 5}) shapes.set(tile, second ? second : 1, 64);
  for (int tile : {6, 7}) shapes.set(tile, TILE_PAIRS, 64);
  return shapes;
}

// Sums [rows, 32] over `steps` steps, added to the sums in `to` if `goes_on`. `second`: number of rows before the
// second half. Meanwhile prefetches LINES cache lines for each pair from `ahead` on, and calls `meanwhile()` once in
// each step.
template <bool HAS_SECOND, int LINES, class Meanwhile>
void multiply_steps(
    const uint32_t* x, int64_t row_pairs, int64_t second, int64_t steps, const PairsOfPanel& panel, const char* ahead,
    bool goes_on, std::array<F16, 2>* to, const Meanwhile& meanwhile) {
  constexpr int64_t SUMS_STRIDE = PANEL * sizeof(float), PANEL_STRIDE = PANEL * sizeof(uint32_t);
  const int64_t x_stride = row_pairs * int64_t(sizeof(uint32_t));
  const uint32_t* x_second = x + second * row_pairs;
  float *sums = reinterpret_cast<float*>(to), *sums_second = sums + second * PANEL;
  if (goes_on) {
    load_tile<0>(sums, SUMS_STRIDE), load_tile<1>(sums + LANES, SUMS_STRIDE);
    if (HAS_SECOND) load_tile<2>(sums_second, SUMS_STRIDE), load_tile<3>(sums_second + LANES, SUMS_STRIDE);
  } else {
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  }
  auto ask = [&] {
    for (int j = 0; j < LINES * TILE_PAIRS / 4; j++, ahead += CACHE_LINE) __builtin_prefetch(ahead, 0, 2);
  };
  panel.read([&](auto&& get, auto) {
    for (int64_t i = 0; i < steps; i++) {
      const uint32_t* weights = get(i * TILE_PAIRS, TILE_PAIRS);
      ask(), load_tile<6>(weights, PANEL_STRIDE);
      ask(), stream_tile<4>(x + i * TILE_PAIRS, x_stride);
      multiply_tiles<0, 4, 6>();
      ask(), load_tile<7>(weights + LANES, PANEL_STRIDE);
      multiply_tiles<1, 4, 7>();
      ask();
      if (HAS_SECOND) {
        stream_tile<5>(x_second + i * TILE_PAIRS, x_stride);
        multiply_tiles<2, 5, 6>();
        multiply_tiles<3, 5, 7>();
      }
      meanwhile();
    }
  });
  store_tile<0>(sums, SUMS_STRIDE), store_tile<1>(sums + LANES, SUMS_STRIDE);
  if (HAS_SECOND) store_tile<2>(sums_second, SUMS_STRIDE), store_tile<3>(sums_second + LANES, SUMS_STRIDE);
}

// Adds `count` pairs of one row, which do not fill a step, to two vectors of sums.
inline void add_pairs(const uint32_t* x, const uint32_t* panel, int64_t count, F16* sums) {
  for (int64_t k = 0; k < count; k++)
    for (int i = 0; i < 2; i++) sums[i] = dot_pairs(sums[i], load<U16>(panel + k * PANEL + i * LANES), x[k]);
}

// Chooses the memory to prefetch while the tiles of a panel are multiplied. For a panel with a single tile, where
// reading is all the work, this is the memory 2 KB ahead, usually within the same page: such panels are read a quarter
// faster than with prefetching the next panel. Otherwise it is the next panel, one line for each pair in each of the
// first tiles.
struct Ahead {
  static constexpr int64_t NEAR = 2048;
  const char* first;
  int64_t lines_of_pair, bytes_of_tile;
  bool is_near, is_next_ours;

  Ahead(const Panels& weight, int64_t panel, int64_t first_pair, int64_t num_pairs, int64_t num_tiles, bool is_next_ours)
      : first(num_tiles == 1 ? weight.at(panel, first_pair) + NEAR : weight.at(panel + 1, first_pair)),
        lines_of_pair(weight.lines_of_pair()), bytes_of_tile(num_pairs * CACHE_LINE), is_near(num_tiles == 1),
        is_next_ours(is_next_ours) {}

  int64_t lines(int64_t tile) const { return is_near ? lines_of_pair : is_next_ours && tile < lines_of_pair ? 1 : 0; }
  const char* from(int64_t tile) const { return first + tile * bytes_of_tile; }
};

// Calls work(whether there is a second half, cache lines for each pair) with compile-time constants.
template <class Work>
void with_lines(bool has_second, int64_t lines, const Work& work) {
  auto with_second = [&](auto second) {
    if (lines == 0) work(second, std::integral_constant<int, 0>());
    else if (lines == 1) work(second, std::integral_constant<int, 1>());
    else work(second, std::integral_constant<int, 2>());
  };
  if (has_second) with_second(std::true_type());
  else with_second(std::false_type());
}

// How a product of T rows and `steps` whole steps is divided into items and parts.
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

// The rows of an item, in tiles of equal height. `second`: number of rows in a tile's first half; 0 if there is no
// second half.
struct TileRows {
  int64_t first, num, num_tiles, height, second;

  TileRows(int64_t begin, int64_t end) : first(begin), num(end - begin) {
    num_tiles = (num + TILE_PAIR_ROWS - 1) / TILE_PAIR_ROWS;
    height = (num + num_tiles - 1) / num_tiles;
    second = height > TILE_ROWS ? (height + 1) / 2 : 0;
  }

  int64_t begin_of(int64_t tile) const { return std::min(tile * height, num - height); }
};

// One thread's share of a product. Finishes the sums of a tile while multiplying the next: vectors use another
// execution unit.
template <class Finish>
class TileMultiplier {
 public:
  TileMultiplier(const bf16* x, const Panels& weight, const TileSplit& split, const Finish& finish)
      : x_(reinterpret_cast<const uint32_t*>(x)), weight_(weight), pairs_(weight.pairs), steps_(weight.pairs / TILE_PAIRS),
        split_(split), finish_(finish),
        sums_((split.num_parts > 1 ? split.panels_of_item * TILE_ITEM_ROWS : 0) + TILE_PAIR_ROWS) {}

  // `is_next_ours`: whether this thread also multiplies the panel after the last of these.
  void run_item(const TileRows& rows, int64_t first_panel, int64_t end_panel, bool is_next_ours) {
    if (rows.height != shaped_height_) TileShapes::use(product_shapes(shaped_height_ = rows.height));
    for (int64_t part = 0; part < split_.num_parts; part++)
      for (int64_t p = first_panel; p < end_panel; p++)
        multiply_panel(rows, p, p - first_panel, part, p + 1 < end_panel || (split_.num_parts == 1 && is_next_ours));
  }

  void finish_last() {
    while (last_.row < last_.end) finish_row();
  }

 private:
  // Rows of one panel that are still to be finished.
  struct Last {
    int64_t row = 0, end = 0, panel = 0;
    std::array<F16, 2>* sums = nullptr;  // of `row`
  };

  void multiply_panel(const TileRows& rows, int64_t p, int64_t place, int64_t part, bool is_next_ours) {
    const int64_t first_step = part * split_.steps_of_part, num_steps = std::min(split_.steps_of_part, steps_ - first_step);
    const int64_t first_pair = first_step * TILE_PAIRS, num_pairs = num_steps * TILE_PAIRS;
    const bool is_last = part + 1 == split_.num_parts;
    PairsOfPanel panel(weight_, p, first_pair, num_pairs, TILE_PAIRS, rows.num_tiles > 1, room_);
    PairsOfPanel left(weight_, p, steps_ * TILE_PAIRS, num_left(), num_left(), true, left_room_);
    const Ahead ahead(weight_, p, first_pair, num_pairs, rows.num_tiles, is_next_ours);
    for (int64_t i = 0; i < rows.num_tiles; i++) {
      std::array<F16, 2>* sums = sums_.data() + (split_.num_parts > 1 ? place * TILE_ITEM_ROWS + i * TILE_PAIR_ROWS : 0);
      const uint32_t* x = x_ + (rows.first + rows.begin_of(i)) * pairs_ + first_pair;
      // By the last step, all rows of the previous tile are finished, so this tile's sums may overwrite theirs.
      if (num_steps == 0) finish_last();
      const int64_t finished_each_step = (last_.end - last_.row + num_steps - 1) / std::max<int64_t>(1, num_steps);
      with_lines(rows.second > 0, ahead.lines(i), [&](auto has_second, auto lines) {
        multiply_steps<decltype(has_second)::value, decltype(lines)::value>(
            x, pairs_, rows.second, num_steps, panel, ahead.from(i), part > 0, sums, [&] {
              for (int64_t n = 0; n < finished_each_step && last_.row < last_.end; n++) finish_row();
            });
      });
      if (is_last) last_ = last_of(rows, i, p, sums);
      if (is_last && num_left() > 0) left.read([&](auto&& get, auto) { add_left(get(0, num_left())); });
      panel.is_narrow = left.is_narrow = false;
    }
  }

  // The number of pairs after the panel's last whole step.
  int64_t num_left() const { return pairs_ - steps_ * TILE_PAIRS; }

  // The rows of tile i, without those that the previous tile already had.
  static Last last_of(const TileRows& rows, int64_t i, int64_t p, std::array<F16, 2>* sums) {
    const int64_t begin = i * rows.height, end = std::min(rows.num, (i + 1) * rows.height);
    return {rows.first + begin, rows.first + end, p, sums + (begin - rows.begin_of(i))};
  }

  void add_left(const uint32_t* left) {
    for (int64_t r = last_.row; r < last_.end; r++)
      add_pairs(x_ + r * pairs_ + steps_ * TILE_PAIRS, left, num_left(), last_.sums[r - last_.row].data());
  }

  void finish_row() { finish_(last_.row++, last_.panel, (last_.sums++)->data()); }

  const uint32_t* const x_;
  const Panels& weight_;
  const int64_t pairs_, steps_;
  const TileSplit& split_;
  const Finish& finish_;
  std::vector<std::array<F16, 2>> sums_;
  std::vector<uint32_t> room_, left_room_;  // for pairs converted to bfloat16
  Last last_;
  TileShapes shapes_;
  int64_t shaped_height_ = 0;
};

// Calls finish(row, panel, two vectors of sums) for all rows and panels.
template <class Finish>
void multiply_by_tiles(const bf16* x, int64_t T, const Panels& weight, const Finish& finish) {
  if (T == 0) return;
  const int64_t num_panels = weight.num_panels;
  const TileSplit split(T, weight.pairs / TILE_PAIRS);
  const int64_t num_groups = (num_panels + split.panels_of_item - 1) / split.panels_of_item;
  for_each_range(split.num_row_blocks * num_groups, [&](int64_t begin, int64_t end) {
    TileMultiplier<Finish> multiplier(x, weight, split, finish);
    for (int64_t item = begin; item < end; item++) {
      int64_t block = item / num_groups, group = item % num_groups;
      TileRows rows(T * block / split.num_row_blocks, T * (block + 1) / split.num_row_blocks);
      int64_t first_panel = group * split.panels_of_item, end_panel = std::min(num_panels, first_panel + split.panels_of_item);
      multiplier.run_item(rows, first_panel, end_panel, item + 1 < end && group + 1 < num_groups);
    }
    multiplier.finish_last();
  });
}

// One thread's share of a product: all rows and the panels in [begin, end).
template <class Finish>
void multiply_tiles_share(const bf16* x, int64_t T, const Panels& weight, int64_t begin, int64_t end, const Finish& finish) {
  const TileSplit split(T, weight.pairs / TILE_PAIRS);
  TileMultiplier<Finish> multiplier(x, weight, split, finish);
  for (int64_t block = 0; block < split.num_row_blocks; block++) {
    const TileRows rows(T * block / split.num_row_blocks, T * (block + 1) / split.num_row_blocks);
    for (int64_t first = begin, last; first < end; first = last) {
      last = std::min(end, first + split.panels_of_item);
      multiplier.run_item(rows, first, last, last < end);
    }
  }
  multiplier.finish_last();
}

}  // namespace tandem

#endif
