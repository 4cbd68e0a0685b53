// x @ weight.T by dot products of pairs: vector operations, for machines without a matrix unit. Each sum adds its
// inputs in order, pair by pair.
#pragma once

#include "panels.h"
#include "product_groups.h"
#include "product_quads.h"
#include "read_ahead.h"
#include "row_blocks.h"
#include "vectors.h"

namespace tandem {

constexpr int MOST_BY_TWOS = MATMUL_ROWS / 4;  // rows with which two panels in MXFP4 are read side by side

// Sums of R rows and one panel. Meanwhile prefetches LINES cache lines for each pair; `ahead[i]` is the i-th piece of
// memory to prefetch.
template <int R, int LINES>
void multiply_rows(const uint32_t* x, int64_t pairs, const PairsOfPanel& panel, const char* const* ahead, F16 (*sums)[2]) {
  constexpr int64_t PAIRS_OF_PIECE = LINES ? ReadAhead::PIECE / ReadAhead::LINE / LINES : INT64_MAX / 2;
  panel.read([&](auto&& get, auto step) {
    constexpr int64_t STEP = decltype(step)::value;
    Sums acc[R][2 * PARTS] = {};
    for (int64_t k = 0; k < pairs;) {
      const char* line = LINES ? *ahead++ : nullptr;
      for (int64_t end = std::min(pairs, k + PAIRS_OF_PIECE); k < end;) {
        const uint32_t* pair = get(k, STEP);
        for (int64_t of_step = 0; of_step < STEP; of_step++, k++, pair += PANEL) {
          Pairs weights[2 * PARTS];
          for (int i = 0; i < 2 * PARTS; i++) weights[i] = load<Pairs>(pair + i * REGISTER);
          for (int i = 0; i < LINES; i++, line += ReadAhead::LINE) __builtin_prefetch(line, 0, 2);
          for (int r = 0; r < R; r++)
            for (int i = 0; i < 2 * PARTS; i++) acc[r][i] = dot_pairs(acc[r][i], weights[i], x[r * pairs + k]);
        }
      }
    }
    std::memcpy(sums, acc, sizeof(acc));
  });
}

using MultiplyRows = void (*)(const uint32_t*, int64_t, const PairsOfPanel&, const char* const*, F16 (*)[2]);

template <int LINES, int... R>
constexpr std::array<MultiplyRows, sizeof...(R)> pairs_of_rows(std::integer_sequence<int, R...>) {
  return {multiply_rows<R + 1, LINES>...};
}

// Sums of R rows and two panels in MXFP4. With so few rows, the sums of one panel would wait for each other longer than
// it takes to convert the weights.
template <int R>
void multiply_two_panels(
    const uint32_t* x, int64_t pairs, const PairsOfPanel& first, const PairsOfPanel& second, EvenlyAhead ahead,
    F16 (*sums)[R][2]) {
  first.read_with(second, [&](auto&& get_first, auto&& get_second, auto step) {
    constexpr int64_t STEP = decltype(step)::value;
    Sums acc[2][R][2 * PARTS] = {};
    const auto add = [&](int p, const uint32_t* pair, int64_t k) {
      for (int i = 0; i < 2 * PARTS; i++) {
        const Pairs weights = load<Pairs>(pair + i * REGISTER);
        for (int r = 0; r < R; r++) acc[p][r][i] = dot_pairs(acc[p][r][i], weights, x[r * pairs + k]);
      }
    };
    for (int64_t k = 0; k < pairs;) {
      const uint32_t *one = get_first(k, STEP), *other = get_second(k, STEP);
      for (int64_t of_step = 0; of_step < STEP; of_step++, k++, one += PANEL, other += PANEL) {
        if (k % 2 == 0) ahead.next();
        add(0, one, k), add(1, other, k);
      }
    }
    std::memcpy(sums, acc, sizeof(acc));
  });
}

// Calls finish(row, panel, two vectors of sums) for the R rows and panels in [begin, end), an even number of them.
// `after`: see multiply_pairs_share.
template <int R, class Finish>
void multiply_by_twos(const uint32_t* x, const Panels& weight, int64_t begin, int64_t end, const char* after, const Finish& finish) {
  const int64_t bytes = 2 * weight.panel_bytes();
  F16 sums[2][R][2];
  std::vector<uint32_t> rooms[2];
  for (int64_t p = begin; p < end; p += 2) {
    const PairsOfPanel first(weight, p, 0, weight.pairs, 1, false, rooms[0]);
    const PairsOfPanel second(weight, p + 1, 0, weight.pairs, 1, false, rooms[1]);
    const char* next = p + 2 < end ? weight.at(p + 2, 0) : after;
    const EvenlyAhead ahead(next, next ? bytes : 0, weight.pairs);
    multiply_two_panels<R>(x, weight.pairs, first, second, ahead, sums);
    for (int64_t i = 0; i < 2; i++)
      for (int r = 0; r < R; r++) finish(r, p + i, sums[i][r]);
  }
}

// One thread's share of a product: calls finish(row, panel, two vectors of sums) for the items in [begin, end). What the
// thread reads afterwards, of a panel's size, is at `after`; null: nothing is known.
template <class Finish>
void multiply_pairs_share(
    const bf16* x, int64_t T, const Panels& weight, int64_t begin, int64_t end, ReadAhead* other, const char* after,
    const Finish& finish) {
  static constexpr auto ROW_COUNTS = std::make_integer_sequence<int, MATMUL_ROWS>();
  static constexpr std::array MULTIPLY = {pairs_of_rows<0>(ROW_COUNTS), pairs_of_rows<1>(ROW_COUNTS), pairs_of_rows<2>(ROW_COUNTS)};
#if TANDEM_QUADS
  if (takes_quads(weight)) return multiply_quads_share(QuadRows(x, T, weight), T, weight, begin, end, after, finish);
#endif
  if (weight.form == Form::INT4) return multiply_groups_share(x, T, weight, begin, end, after, finish);
  const int64_t pairs = weight.pairs, row_blocks = row_blocks_of(T);
  const uint32_t* xp = reinterpret_cast<const uint32_t*>(x);
  if (T <= MOST_BY_TWOS && weight.form == Form::MXFP4) {
    const int64_t even = end - (end - begin) % 2;
    with_rows<1, MOST_BY_TWOS>(T, [&](auto rows) { multiply_by_twos<decltype(rows)::value>(xp, weight, begin, even, even == end ? after : weight.at(even, 0), finish); });
    begin = even;
  }
  F16 sums[MATMUL_ROWS][2];
  Asking asking;
  std::vector<uint32_t> room;
  for (int64_t item = begin; item < end; item++) {
    int64_t p = item / row_blocks, first = item % row_blocks * ROWS_OF_ITEM, rows = std::min(ROWS_OF_ITEM, T - first);
    int64_t num_tiles = (rows + MATMUL_ROWS - 1) / MATMUL_ROWS;
    PairsOfPanel panel(weight, p, 0, pairs, 1, num_tiles > 1, room);
    const bool is_next_ours = (item + 1) / row_blocks != p && item + 1 < end;
    const char* next = is_next_ours ? weight.at(p + 1, 0) : item + 1 == end ? after : nullptr;
    for (int64_t i = 0; i < num_tiles; i++) {
      int64_t from = first + rows * i / num_tiles, to = first + rows * (i + 1) / num_tiles;
      if (!next || !asking.next_panel(next, pairs, weight.lines_of_pair(), i, num_tiles))
        asking.others(num_tiles > 2 ? other : nullptr, pairs);
      MULTIPLY[asking.lines][to - from - 1](xp + from * pairs, pairs, panel, asking.pieces.data(), sums);
      panel.is_narrow = false;
      for (int64_t r = from; r < to; r++) finish(r, p, sums[r - from]);
    }
  }
}

// Calls finish(row, panel, two vectors of sums) for all rows and panels.
template <class Finish>
void multiply_pairs(const bf16* x, int64_t T, const Panels& weight, ReadAhead* other, const Finish& finish) {
#if TANDEM_QUADS
  if (takes_quads(weight)) {
    const QuadRows rows(x, T, weight);
    return for_each_range(weight.num_panels * row_blocks_of(T), [&](int64_t begin, int64_t end) {
      multiply_quads_share(rows, T, weight, begin, end, nullptr, finish);
    });
  }
#endif
  for_each_range(weight.num_panels * row_blocks_of(T), [&](int64_t begin, int64_t end) {
    multiply_pairs_share(x, T, weight, begin, end, other, nullptr, finish);
  });
}

}  // namespace tandem
