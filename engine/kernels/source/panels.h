// The layout of a product's weights: [N, K] in panels of 32 outputs, [N / 32, K / 2, 32, 2], the last one padded with
// zeros. One vector operation multiplies a pair of inputs by 16 outputs; 16 such pairs form a tile of the matrix unit;
// a panel is read sequentially.
//
// Weights are bfloat16, or 8-bit integers, which are half the bytes to read, or in 4 bits: integers (int4.h) or MXFP4
// (mxfp4.h). The first rows that are multiplied by a panel of such numbers convert it to bfloat16 on the way, and later
// rows use the result. Sums of 8-bit weights are then multiplied by one scale for each output; 4-bit weights are
// converted to their actual values at once, except where products of pairs multiply integers (product_groups.h).
#pragma once

#include <optional>
#include <vector>

#include "huge_pages.h"
#include "int4.h"
#include "mxfp4.h"
#include "vectors.h"

namespace tandem {

constexpr int64_t PANEL = 2 * LANES;
static_assert(INT4_STEP_PAIRS == MXFP4_PAIRS, "weights in 4 bits are read in steps of one size");

// Rearranges [N, K] into panels of the same numbers.
at::Tensor pack_weight(const at::Tensor& weight) {
  int64_t N = weight.size(0), K = weight.size(1), num_panels = (N + PANEL - 1) / PANEL;
  TORCH_CHECK(weight.is_contiguous() && K % 2 == 0, "weight [N, K], contiguous, K even");
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kChar, "weight: bfloat16 or int8");
  at::Tensor out = zeros_for_weights({num_panels, K / 2, PANEL, 2}, weight.options());
  const int64_t bytes = weight.element_size();
  const char* from = static_cast<const char*>(weight.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  // Copies a few pairs of all rows of a panel at a time: copying whole rows would touch as many cache lines as pairs.
  constexpr int64_t PAIRS_AT_ONCE = 16;
  const auto pack = [&](auto pair, int64_t panel) {  // only the type of `pair` is used, that of a pair
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

enum class Form { BFLOAT16, INT8, INT4, MXFP4 };

// View of a weight in panels. Does not own it.
struct Panels {
  Form form;
  int64_t num_panels, pairs;

  explicit Panels(const at::Tensor& weight)
      : form(form_of(weight)), num_panels(weight.size(0)), bytes_(static_cast<const char*>(weight.data_ptr())) {
    TORCH_CHECK(weight.dim() == (form == Form::INT4 ? 3 : 4) && weight.is_contiguous(), "weight in panels");
    if (form == Form::INT4) {
      int4_head_ = int4_head(weight), group_bytes_ = weight.size(2) * int64_t(weight.element_size());
      pairs_of_group_ = (group_bytes_ - int4_head_bytes(int4_head_)) / INT4_PAIR_BYTES;
    } else if (form == Form::MXFP4) {
      group_bytes_ = MXFP4_GROUP_BYTES, pairs_of_group_ = MXFP4_PAIRS;
      TORCH_CHECK(weight.size(2) * weight.size(3) == MXFP4_GROUP_BYTES, "weight in panels of MXFP4");
    } else {
      pairs_of_group_ = 1, group_bytes_ = form == Form::INT8 ? PANEL * 2 : PANEL * 4;
    }
    pairs = weight.size(1) * pairs_of_group_;
    panel_bytes_ = pairs / pairs_of_group_ * group_bytes_;
  }

  // Cache lines that one pair of inputs occupies in a panel, rounded up.
  int64_t lines_of_pair() const { return form == Form::BFLOAT16 ? 2 : 1; }

  bool in_four_bits() const { return form == Form::INT4 || form == Form::MXFP4; }

  // Address of a pair of inputs in its stored form; for 4 bits, of the group that contains the pair.
  const char* at(int64_t panel, int64_t pair) const {
    return bytes_ + panel * panel_bytes_ + pair / pairs_of_group_ * group_bytes_;
  }

  int64_t panel_bytes() const { return panel_bytes_; }
  int64_t pairs_of_group() const { return pairs_of_group_; }
  int64_t group_bytes() const { return group_bytes_; }
  Int4Head head() const { return int4_head_; }

 private:
  static Form form_of(const at::Tensor& weight) {
    const auto type = weight.scalar_type();
    const bool has_head = weight.dim() == 3 && (type == at::kBFloat16 || type == at::kHalf || type == at::kFloat);
    if (has_head) return Form::INT4;
    TORCH_CHECK(type == at::kBFloat16 || type == at::kChar || type == at::kByte, "weight: panels of bfloat16, int8, int4 or MXFP4");
    return type == at::kByte ? Form::MXFP4 : type == at::kBFloat16 ? Form::BFLOAT16 : Form::INT8;
  }

  const char* bytes_;
  int64_t panel_bytes_, group_bytes_, pairs_of_group_;
  Int4Head int4_head_ = Int4Head::FLOAT32;
};

// A range of pairs of one panel, as products read them: bfloat16 in place, or integers to be converted into `wide`.
struct PairsOfPanel {
  using FourBitStep = std::integral_constant<int64_t, INT4_STEP_PAIRS>;

  const uint32_t* wide;
  bool is_narrow = false;  // until the integers have been converted
  bool is_kept = true;     // false: each step overwrites the converted pairs of the step before

  // `num_pairs` pairs from `first` on, read `of_step` at a time; 4-bit weights are read in whole steps.
  // `is_read_again`: further rows will read them. `room` must outlive this object.
  PairsOfPanel(
      const Panels& weight, int64_t panel, int64_t first, int64_t num_pairs, int64_t of_step, bool is_read_again,
      std::vector<uint32_t>& room)
      : form_(weight.form), narrow_(weight.at(panel, first)), group_bytes_(weight.group_bytes()), head_(weight.head()) {
    wide = reinterpret_cast<const uint32_t*>(narrow_);
    if (form_ == Form::BFLOAT16) return;
    if (weight.in_four_bits()) {
      of_step = INT4_STEP_PAIRS, steps_of_group_ = weight.pairs_of_group() / INT4_STEP_PAIRS;
      first_step_ = first % weight.pairs_of_group() / INT4_STEP_PAIRS;
    }
    is_narrow = true, is_kept = is_read_again;
    constexpr size_t LINE = 64;  // vectors that begin elsewhere are written to, and read from, two cache lines each
    size_t needed = size_t((is_kept ? num_pairs : of_step) * PANEL) + LINE / sizeof(uint32_t);
    if (room.size() < needed) room.resize(needed);
    wide = reinterpret_cast<const uint32_t*>((reinterpret_cast<uintptr_t>(room.data()) + LINE - 1) / LINE * LINE);
  }

  // Calls work(get, step), where get(first, count) returns the pairs from `first` on; count is a multiple of `step`.
  // Compiled separately for pairs in place and pairs to convert, because a branch would slow down hot loops.
  template <class Work>
  void read(const Work& work) const {
    using One = std::integral_constant<int64_t, 1>;
    if (!is_narrow) return work([from = wide](int64_t first, int64_t) { return from + first * PANEL; }, One());
    if (form_ == Form::INT8) return work(of_int8(), One());
    if (form_ == Form::INT4) return work(of_int4(), FourBitStep());
    work(of_mxfp4(), FourBitStep());
  }

  // The same for two panels in MXFP4 that are read side by side: work(get, get of `other`, step).
  template <class Work>
  void read_with(const PairsOfPanel& other, const Work& work) const {
    work(of_mxfp4(), other.of_mxfp4(), FourBitStep());
  }

 private:
  auto of_int8() const {
    return [to = const_cast<uint32_t*>(wide), from = reinterpret_cast<const int8_t*>(narrow_), keeps = is_kept](
               int64_t first, int64_t count) -> const uint32_t* {
      uint32_t* found = to + (keeps ? first * PANEL : 0);
      for (int64_t i = 0; i < count * PANEL; i += PANEL) widen(from + (first * PANEL + i) * 2, reinterpret_cast<bf16*>(found + i));
      return found;
    };
  }

  // Must be called for the steps in order, one at a time.
  auto of_int4() const {
    return [to = const_cast<uint32_t*>(wide), group = narrow_, keeps = is_kept, group_bytes = group_bytes_,
            steps_of_group = steps_of_group_, head = head_, step = first_step_](int64_t first, int64_t) mutable -> const uint32_t* {
      uint32_t* found = to + (keeps ? first * PANEL : 0);
      widen_int4(group, head, step, found);
      if (++step == steps_of_group) step = 0, group += group_bytes;
      return found;
    };
  }

  // Likewise. A step is a group.
  auto of_mxfp4() const {
    return [to = const_cast<uint32_t*>(wide), group = narrow_, keeps = is_kept](int64_t first, int64_t) mutable -> const uint32_t* {
      uint32_t* found = to + (keeps ? first * PANEL : 0);
      widen_mxfp4(group, reinterpret_cast<bf16*>(found));
      group += MXFP4_GROUP_BYTES;
      return found;
    };
  }

  Form form_;
  const char* narrow_;
  int64_t group_bytes_, steps_of_group_ = 1, first_step_ = 0;
  Int4Head head_;
};

}  // namespace tandem
