// How the weights of a product are kept: [N, K] in panels of 32 outputs, [N / 32, K / 2, 32, 2], the last one filled up
// with zeros. A pair of inputs times 16 outputs is one vector operation, 16 such pairs are a tile of the matrix unit, and a
// panel is read from end to end.
//
// In bfloat16, or as integers of 8 bits, which are half the bytes to read: the first rows that are multiplied by a panel of
// these widen it, pair by pair, and leave it so for those that follow. Sums are then multiplied by one scale an output.
#pragma once

#include <optional>
#include <vector>

#include "huge_pages.h"
#include "vectors.h"

namespace tandem {

constexpr int64_t PANEL = 2 * LANES;

// [N, K] into panels of the same numbers.
at::Tensor pack_weight(const at::Tensor& weight) {
  int64_t N = weight.size(0), K = weight.size(1), num_panels = (N + PANEL - 1) / PANEL;
  TORCH_CHECK(weight.is_contiguous() && K % 2 == 0, "weight [N, K], contiguous, K even");
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kChar, "weight: bfloat16 or int8");
  at::Tensor out = zeros_for_weights({num_panels, K / 2, PANEL, 2}, weight.options());
  const int64_t bytes = weight.element_size();
  const char* from = static_cast<const char*>(weight.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  // Some pairs of all rows of a panel after the others: a whole row's would fall into as many lines of the cache.
  constexpr int64_t PAIRS_AT_ONCE = 16;
  const auto pack = [&](auto pair, int64_t panel) {  // a pair's type
    const int64_t pairs = K / 2, rows = std::min(PANEL, N - panel * PANEL);
    const auto* rows_from = reinterpret_cast<const decltype(pair)*>(from) + panel * PANEL * pairs;
    auto* panel_to = reinterpret_cast<decltype(pair)*>(to) + panel * PANEL * pairs;
    for (int64_t first = 0; first < pairs; first += PAIRS_AT_ONCE)
      for (int64_t n = 0; n < rows; n++)
        for (int64_t k = first; k < std::min(pairs, first + PAIRS_AT_ONCE); k++)
          panel_to[k * PANEL + n] = rows_from[n * pairs + k];
  };
  for_each_range(num_panels, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++)
      if (bytes == 1) pack(uint16_t(), panel);
      else pack(uint32_t(), panel);
  });
  return out;
}

// A weight in panels. Does not own it.
struct Panels {
  int64_t num_panels, pairs;

  explicit Panels(const at::Tensor& weight)
      : num_panels(weight.size(0)), pairs(weight.size(1)), bytes_(static_cast<const char*>(weight.data_ptr())),
        is_narrow_(weight.scalar_type() == at::kChar) {
    TORCH_CHECK(is_narrow_ || weight.scalar_type() == at::kBFloat16, "weight: panels of bfloat16 or int8");
  }

  int64_t pair_bytes() const { return is_narrow_ ? PANEL * 2 : PANEL * 4; }

  // Where a pair of inputs lies, as it is kept.
  const char* at(int64_t panel, int64_t pair) const { return bytes_ + (panel * pairs + pair) * pair_bytes(); }

  bool is_narrow() const { return is_narrow_; }

 private:
  const char* bytes_;
  bool is_narrow_;
};

// Pairs of one panel from some on, as products read them: in bfloat16 where they lie, or narrow and on their way to `wide`.
struct PairsOfPanel {
  const uint32_t* wide;
  const int8_t* narrow = nullptr;  // until they have been widened
  bool is_kept = true;             // or else every `of_step` pairs take the place of those before

  // `num_pairs`, read `of_step` at a time, `is_read_again` by further rows. `room` must outlive it.
  PairsOfPanel(
      const Panels& weight, int64_t panel, int64_t first, int64_t num_pairs, int64_t of_step, bool is_read_again,
      std::vector<uint32_t>& room) {
    const char* from = weight.at(panel, first);
    wide = reinterpret_cast<const uint32_t*>(from);
    if (!weight.is_narrow()) return;
    narrow = reinterpret_cast<const int8_t*>(from), is_kept = is_read_again;
    size_t needed = size_t((is_kept ? num_pairs : of_step) * PANEL);
    if (room.size() < needed) room.resize(needed);
    wide = room.data();
  }

  // Calls work(get), where get(first, count) are pairs from `first` on: compiled for those that lie there wide and for
  // those that have to be widened apart, since hot loops feel a branch.
  template <class Work>
  void read(const Work& work) const {
    if (!narrow) return work([from = wide](int64_t first, int64_t) { return from + first * PANEL; });
    work([to = const_cast<uint32_t*>(wide), from = narrow, keeps = is_kept](int64_t first, int64_t count) -> const uint32_t* {
      uint32_t* found = to + (keeps ? first * PANEL : 0);
      for (int64_t i = 0; i < count * PANEL; i += PANEL) widen(from + (first * PANEL + i) * 2, reinterpret_cast<bf16*>(found + i));
      return found;
    });
  }
};

}  // namespace tandem
