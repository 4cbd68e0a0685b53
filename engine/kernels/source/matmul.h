// x @ weight.T + bias: bfloat16 in and out, sums in float32.
//
// Why not oneDNN's: which products it adds in which order depends on the number of rows, so that a token would depend on
// its batch. Here each sum runs through its inputs in their order, whatever rows stand beside it. And with few rows, where
// reading the weights is all the work, a third of oneDNN's time went into its calls.
//
// A weight [N, K] is kept in panels of 32 outputs, [N / 32, K / 2, 32, 2], the last one filled up with zeros: one pair of
// inputs times 16 outputs is one vector operation, and a panel is read from end to end.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <optional>
#include <vector>

#include "adapters.h"
#include "vectors.h"

namespace tandem {

constexpr int64_t PANEL = 2 * LANES;
#if defined(__AVX512F__)
constexpr int MATMUL_ROWS = 12;  // rows that share a load of weights: their sums fill the registers
#else
constexpr int MATMUL_ROWS = 3;
#endif
constexpr int64_t ROWS_OF_ITEM = 16 * MATMUL_ROWS;

// What will be read soon, and is asked for while products compute: memory in pieces of a page, each handed out once.
struct ReadAhead {
  static constexpr int64_t PIECE = 4096, LINE = 64;
  std::vector<const char*> pieces;
  std::atomic<int64_t> next{0};
};

// Sums of R rows and one panel. Meanwhile memory is asked for, LINES cache lines a pair: `ahead[i]` is its piece i.
template <int R, int LINES>
void multiply_tile(const uint32_t* x, int64_t pairs, const uint32_t* panel, const char* const* ahead, F16 (*sums)[2]) {
  constexpr int64_t PAIRS_OF_PIECE = LINES ? ReadAhead::PIECE / ReadAhead::LINE / LINES : INT64_MAX / 2;
  F16 acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = F16{};
  for (int64_t k = 0; k < pairs;) {
    const char* line = LINES ? *ahead++ : nullptr;
    for (int64_t end = std::min(pairs, k + PAIRS_OF_PIECE); k < end; k++) {
      U16 low = load<U16>(panel + k * PANEL), high = load<U16>(panel + k * PANEL + LANES);
      for (int i = 0; i < LINES; i++, line += ReadAhead::LINE) __builtin_prefetch(line, 0, 2);
      for (int r = 0; r < R; r++) {
        uint32_t pair = x[r * pairs + k];
        acc[r][0] = dot_pairs(acc[r][0], low, pair);
        acc[r][1] = dot_pairs(acc[r][1], high, pair);
      }
    }
  }
  for (int r = 0; r < R; r++) sums[r][0] = acc[r][0], sums[r][1] = acc[r][1];
}

using MultiplyTile = void (*)(const uint32_t*, int64_t, const uint32_t*, const char* const*, F16 (*)[2]);

template <int LINES, int... R>
constexpr std::array<MultiplyTile, sizeof...(R)> multiply_tiles(std::integer_sequence<int, R...>) {
  return {multiply_tile<R + 1, LINES>...};
}

// Which memory the tiles of one panel ask for: the next panel first, in the first two of them; then `other`, as long as
// there is any. With few rows, where reading is all the work, only panels.
struct Asking {
  std::vector<const char*> pieces;
  int lines = 0;

  void next_panel(const char* panel, int64_t panel_bytes, int64_t tile, int64_t num_tiles) {
    lines = num_tiles == 1 ? 2 : tile < 2 ? 1 : 0;
    ask(panel + (lines == 1 ? tile * (panel_bytes / 2) : 0), lines * (panel_bytes / 2));
  }

  void others(ReadAhead* other, int64_t pairs) {
    lines = 0;
    int64_t wanted = (2 * pairs * ReadAhead::LINE + ReadAhead::PIECE - 1) / ReadAhead::PIECE;
    if (!other || other->next + wanted > int64_t(other->pieces.size())) return;
    int64_t first = other->next.fetch_add(wanted);
    if (first + wanted > int64_t(other->pieces.size())) return;  // another thread took them just now
    lines = 2;
    pieces.assign(other->pieces.begin() + first, other->pieces.begin() + first + wanted);
  }

 private:
  void ask(const char* begin, int64_t bytes) {
    pieces.clear();
    for (int64_t at = 0; at < bytes; at += ReadAhead::PIECE) pieces.push_back(begin + at);
  }
};

// Calls finish(row, panel, two vectors of sums) for all rows and panels.
template <class Finish>
void multiply(
    const bf16* x, int64_t T, int64_t K, const bf16* weight, int64_t num_panels, ReadAhead* other, const Finish& finish) {
  static constexpr auto ROW_COUNTS = std::make_integer_sequence<int, MATMUL_ROWS>();
  static constexpr std::array TILES = {multiply_tiles<0>(ROW_COUNTS), multiply_tiles<1>(ROW_COUNTS), multiply_tiles<2>(ROW_COUNTS)};
  const int64_t pairs = K / 2, panel_bytes = pairs * PANEL * 4;
  const uint32_t* xp = reinterpret_cast<const uint32_t*>(x);
  int64_t row_blocks = (T + ROWS_OF_ITEM - 1) / ROWS_OF_ITEM;
  for_each_range(num_panels * row_blocks, [&](int64_t begin, int64_t end) {
    F16 sums[MATMUL_ROWS][2];
    Asking asking;
    for (int64_t item = begin; item < end; item++) {
      int64_t p = item / row_blocks, first = item % row_blocks * ROWS_OF_ITEM, rows = std::min(ROWS_OF_ITEM, T - first);
      int64_t num_tiles = (rows + MATMUL_ROWS - 1) / MATMUL_ROWS;
      const char* panel = reinterpret_cast<const char*>(weight) + p * panel_bytes;
      bool is_next_ours = (item + 1) / row_blocks != p && item + 1 < end;
      for (int64_t i = 0; i < num_tiles; i++) {
        int64_t from = first + rows * i / num_tiles, to = first + rows * (i + 1) / num_tiles;
        if (is_next_ours && i < 2) asking.next_panel(panel + panel_bytes, panel_bytes, i, num_tiles);
        else asking.others(num_tiles > 2 ? other : nullptr, pairs);
        TILES[asking.lines][to - from - 1](
            xp + from * pairs, pairs, reinterpret_cast<const uint32_t*>(panel), asking.pieces.data(), sums);
        for (int64_t r = from; r < to; r++) finish(r, p, sums[r - from]);
      }
    }
  });
}

// [N, K] into panels.
at::Tensor pack_weight(const at::Tensor& weight) {
  int64_t N = weight.size(0), K = weight.size(1), num_panels = (N + PANEL - 1) / PANEL;
  TORCH_CHECK(weight.is_contiguous() && K % 2 == 0, "weight [N, K], contiguous, K even");
  at::Tensor out = at::zeros({num_panels, K / 2, PANEL, 2}, weight.options());
  const bf16* from = data_of(weight);
  bf16* to = data_of(out);
  for_each_range(num_panels, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * PANEL; n < std::min(N, end * PANEL); n++)
      for (int64_t k = 0; k < K; k += 2) {
        int64_t pair = n / PANEL * (K / 2) + k / 2;
        std::memcpy(to + (pair * PANEL + n % PANEL) * 2, from + n * K + k, 4);
      }
  });
  return out;
}

inline void check_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x [T, K], contiguous");
  TORCH_CHECK(weight.dim() == 4 && weight.is_contiguous() && weight.size(1) * 2 == x.size(1), "weight in panels, of K inputs");
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == weight.size(0) * PANEL), "bias: one number an output of a panel");
}

inline void check_added(const AddedProduct* added, const at::Tensor& weight) {
  TORCH_CHECK(!added || added->num_sixteens == 2 * weight.size(0), "what is added must have the product's panels");
}

// x [T, K], weight in panels, bias [panels * 32] -> [T, num_outputs], which leaves out what fills up the last panel.
// `added` of `rows`: what adapters add, where there are some.
at::Tensor linear_ahead(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, int64_t num_outputs,
    ReadAhead* ahead, const AddedProduct* added = nullptr, const AdapterRows* rows = nullptr) {
  check_product(x, weight, bias);
  TORCH_CHECK((num_outputs + PANEL - 1) / PANEL == weight.size(0), "num_outputs must end in the last panel");
  check_added(added, weight);
  const Adding adding(added, rows, x);
  at::Tensor out = at::empty({x.size(0), num_outputs}, x.options());
  bf16* to = data_of(out);
  const bf16* b = bias ? data_of(*bias) : nullptr;
  multiply(data_of(x), x.size(0), x.size(1), data_of(weight), weight.size(0), ahead, [&](int64_t row, int64_t panel, F16* sums) {
    int64_t at = panel * PANEL, left = num_outputs - at;
    for (int i = 0; b && i < 2; i++) sums[i] += to_float(b + at + i * LANES);
    if (adding) adding.add(row, panel, sums);
    bf16 rounded[PANEL];
    bf16* y = left < PANEL ? rounded : to + row * num_outputs + at;
    store_bf16(y, sums[0]);
    store_bf16(y + LANES, sums[1]);
    if (left < PANEL) std::memcpy(to + row * num_outputs + at, rounded, left * sizeof(bf16));
  });
  return out;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, int64_t num_outputs) {
  return linear_ahead(x, weight, bias, num_outputs, nullptr);
}

// As `linear` without a bias, but not rounded: [T, num_outputs] in float32. For logits: at 25, bfloat16 knows but eighths,
// and the likeliest two would often be equal.
at::Tensor linear_float(const at::Tensor& x, const at::Tensor& weight, int64_t num_outputs) {
  check_product(x, weight, std::nullopt);
  TORCH_CHECK((num_outputs + PANEL - 1) / PANEL == weight.size(0), "num_outputs must end in the last panel");
  at::Tensor out = at::empty({x.size(0), num_outputs}, x.options().dtype(at::kFloat));
  float* to = out.data_ptr<float>();
  multiply(data_of(x), x.size(0), x.size(1), data_of(weight), weight.size(0), nullptr, [&](int64_t row, int64_t panel, F16* sums) {
    int64_t at = panel * PANEL;
    std::memcpy(to + row * num_outputs + at, sums, std::min(num_outputs - at, PANEL) * sizeof(float));
  });
  return out;
}

// silu(x @ gate.T) * (x @ up.T), where each panel holds 16 outputs of the gate and the 16 of `up` beside them.
at::Tensor gated_linear_ahead(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, int64_t num_outputs,
    ReadAhead* ahead, const AddedProduct* added = nullptr, const AdapterRows* rows = nullptr) {
  check_product(x, weight, bias);
  TORCH_CHECK((num_outputs + LANES - 1) / LANES == weight.size(0), "num_outputs must end in the last panel");
  check_added(added, weight);
  const Adding adding(added, rows, x);
  at::Tensor out = at::empty({x.size(0), num_outputs}, x.options());
  bf16* to = data_of(out);
  const bf16* b = bias ? data_of(*bias) : nullptr;
  multiply(data_of(x), x.size(0), x.size(1), data_of(weight), weight.size(0), ahead, [&](int64_t row, int64_t panel, F16* sums) {
    int64_t at = panel * LANES, left = num_outputs - at;
    for (int i = 0; b && i < 2; i++) sums[i] += to_float(b + panel * PANEL + i * LANES);
    if (adding) adding.add(row, panel, sums);
    F16 gate = rounded(sums[0]), up = rounded(sums[1]);
    F16 shrinking = exp_of(gate < 0.0f ? gate : -gate);  // exp(-|gate|)
    F16 at_low = gate < -87.0f ? F16{} : shrinking;
    F16 silu = gate * (gate < 0.0f ? at_low : broadcast(1.0f)) / (1.0f + shrinking);
    bf16 y[LANES];
    store_bf16(y, rounded(silu) * up);
    std::memcpy(to + row * num_outputs + at, y, std::min<int64_t>(left, LANES) * sizeof(bf16));
  });
  return out;
}

at::Tensor gated_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, int64_t num_outputs) {
  return gated_linear_ahead(x, weight, bias, num_outputs, nullptr);
}

// `linear` and `gated_linear` with what adapters add. adapter_ids [T] int32: each row's, 0 for none.
at::Tensor adapted_linear(
    const c10::intrusive_ptr<AddedProduct>& added, const at::Tensor& x, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, int64_t num_outputs, const at::Tensor& adapter_ids) {
  const AdapterRows rows(adapter_ids);
  return linear_ahead(x, weight, bias, num_outputs, nullptr, added.get(), &rows);
}

at::Tensor adapted_gated_linear(
    const c10::intrusive_ptr<AddedProduct>& added, const at::Tensor& x, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, int64_t num_outputs, const at::Tensor& adapter_ids) {
  const AdapterRows rows(adapter_ids);
  return gated_linear_ahead(x, weight, bias, num_outputs, nullptr, added.get(), &rows);
}

}  // namespace tandem
