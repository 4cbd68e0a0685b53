// x @ weight.T with weights in int4 (int4.h), by dot products of pairs, for machines without a matrix unit. Each group's
// integers are multiplied as they are; its sum is multiplied by the group's scale, and the offset by the sum of its
// inputs:
//
//   sum over groups of (scale * sum of (x * integer) + offset * sum of x)
//
// This takes a third of the operations of computing each weight first, and does not round the weights to bfloat16. Each
// sum adds its inputs, and its groups, in order.
#pragma once

#include <vector>

#include "panels.h"
#include "read_ahead.h"
#include "row_blocks.h"
#include "vectors.h"

namespace tandem {

// Panels of int4, from one of them on.
struct GroupsOfPanel {
  const char* groups;
  int64_t num_groups, panel_bytes, group_bytes, steps_of_group;
  Int4Head head;

  GroupsOfPanel(const Panels& weight, int64_t panel)
      : groups(weight.at(panel, 0)), num_groups(weight.pairs / weight.pairs_of_group()), panel_bytes(weight.panel_bytes()),
        group_bytes(weight.group_bytes()), steps_of_group(weight.pairs_of_group() / INT4_STEP_PAIRS), head(weight.head()) {}

  const char* group(int p, int64_t g) const { return groups + p * panel_bytes + g * group_bytes; }
  const char* words(int64_t g) const { return group(0, g) + int4_head_bytes(head); }
  Sums scale(int p, int64_t g, int part) const { return int4_numbers(group(p, g), head, part); }
  Sums offset(int p, int64_t g, int part) const { return int4_numbers(group(p, g) + int4_head_bytes(head) / 2, head, part); }
};

// Sums of R rows and P panels, which are read side by side. x_sums [R, groups]: the sums of each group's inputs.
template <int R, int P>
void multiply_groups(
    const uint32_t* x, int64_t pairs, const float* x_sums, const GroupsOfPanel& panels, EvenlyAhead ahead, F16 (*sums)[R][2]) {
  const auto for_each_sum = [](const auto& work) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int p = 0; p < P; p++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * PARTS; i++) work(p, r, i);
  };
  // The totals stay there: GCC would copy them back and forth between registers and the stack.
  const auto in_memory = [] { asm volatile("" ::: "memory"); };
  float* const totals = reinterpret_cast<float*>(sums);
  const auto total_of = [&](int p, int r, int i) { return totals + (p * R + r) * PANEL + i * REGISTER; };
  for_each_sum([&](int p, int r, int i) { store(total_of(p, r, i), Sums{}); });
  for (int64_t g = 0; g < panels.num_groups; g++) {
    Sums acc[P][R][2 * PARTS] = {};
    const char* words = panels.words(g);
    for (int64_t s = 0; s < panels.steps_of_group; s++) {
      for (int64_t k = 0; k < INT4_STEP_PAIRS; k += 2, words += WORDS_BYTES, x += 2) {
        ahead.next();
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; pair++) {
          Pairs integers[P][2 * PARTS];
#pragma GCC unroll 2
          for (int p = 0; p < P; p++) int4_pair(words + p * panels.panel_bytes, pair, integers[p]);
          for_each_sum([&](int p, int r, int i) { acc[p][r][i] = dot_pairs(acc[p][r][i], integers[p][i], x[r * pairs + pair]); });
        }
      }
    }
    in_memory();
    Sums scale[P][2 * PARTS];
    for (int p = 0; p < P; p++)
      for (int i = 0; i < 2 * PARTS; i++) scale[p][i] = panels.scale(p, g, i);
    for_each_sum([&](int p, int r, int i) {
      float* total = total_of(p, r, i);
      store(total, load<Sums>(total) + acc[p][r][i] * scale[p][i]);
    });
    in_memory();
  }
  Sums total[P][R][2 * PARTS];
  for_each_sum([&](int p, int r, int i) { total[p][r][i] = load<Sums>(total_of(p, r, i)); });
  for (int64_t g = 0; g < panels.num_groups; g++)
    for_each_sum([&](int p, int r, int i) {
      total[p][r][i] += broadcast(x_sums[r * panels.num_groups + g]) * panels.offset(p, g, i);
    });
  for_each_sum([&](int p, int r, int i) { store(total_of(p, r, i), total[p][r][i]); });
}

// Sums of each group of a row's inputs: [T, groups].
inline std::vector<float> sums_of_groups(const bf16* x, int64_t T, int64_t num_groups, int64_t inputs_of_group) {
  std::vector<float> sums(T * num_groups);
  for (float& sum : sums) {
    Sums of_group = {};
    for (int64_t i = 0; i < inputs_of_group; i += REGISTER, x += REGISTER) of_group += to_sums(x);
    sum = sum_of(of_group);
  }
  return sums;
}

// One thread's share of a product: calls finish(row, panel, two vectors of sums) for the items in [begin, end). What the
// thread reads afterwards, of a panel's size, is at `after`; null: nothing is known.
template <class Finish>
void multiply_groups_share(
    const bf16* x, int64_t T, const Panels& weight, int64_t begin, int64_t end, const char* after, const Finish& finish) {
  if (begin == end) return;
  const int64_t pairs = weight.pairs, row_blocks = row_blocks_of(T), num_groups = pairs / weight.pairs_of_group();
  const uint32_t* xp = reinterpret_cast<const uint32_t*>(x);
  const std::vector<float> x_sums = sums_of_groups(x, T, num_groups, 2 * weight.pairs_of_group());
  // Rows [from, to) and P panels from `panel` on; meanwhile prefetches `bytes` from `next` on.
  const auto multiply = [&](auto P, int64_t panel, int64_t from, int64_t to, const char* next, int64_t bytes) {
    with_rows<1, MATMUL_ROWS / P()>(to - from, [&](auto R) {
      F16 sums[P()][R()][2];
      const EvenlyAhead ahead(next, bytes, pairs);
      multiply_groups<R(), P()>(xp + from * pairs, pairs, x_sums.data() + from * num_groups, GroupsOfPanel(weight, panel), ahead, sums);
      for (int p = 0; p < P(); p++)
        for (int r = 0; r < R(); r++) finish(from + r, panel + p, sums[p][r]);
    });
  };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  const int64_t panel_bytes = weight.panel_bytes();
  // With so many rows, the sums of one panel would wait for each other; with fewer, it takes longer to read two panels.
  if (T > 2 && T <= MATMUL_ROWS / 2)
    for (; begin + 1 < end; begin += 2) {
      const bool is_next_ours = begin + 2 < end;
      multiply(Two(), begin, 0, T, is_next_ours ? weight.at(begin + 2, 0) : after, is_next_ours || after ? 2 * panel_bytes : 0);
    }
  for (int64_t item = begin; item < end; item++) {
    const int64_t p = item / row_blocks, first = item % row_blocks * ROWS_OF_ITEM, rows = std::min(ROWS_OF_ITEM, T - first);
    const int64_t num_tiles = (rows + MATMUL_ROWS - 1) / MATMUL_ROWS;
    const bool is_next_ours = (item + 1) / row_blocks != p && item + 1 < end;
    const char* next = is_next_ours ? weight.at(p + 1, 0) : item + 1 == end ? after : nullptr;
    const int64_t bytes = (panel_bytes + num_tiles - 1) / num_tiles;
    for (int64_t i = 0; i < num_tiles; i++)
      multiply(
          One(), p, first + rows * i / num_tiles, first + rows * (i + 1) / num_tiles, next ? next + i * bytes : nullptr,
          next ? bytes : 0);
  }
}

}  // namespace tandem
