// x @ weight.T * scale + bias: bfloat16 in and out, sums in float32. 8-bit weights have one scale for each output.
//
// Why not oneDNN: its order of additions depends on the number of rows, so the result of a token would depend on its
// batch. Here, each sum adds its inputs in order, whatever other rows there are. And with few rows, where reading the
// weights is all the work, a third of oneDNN's time was spent in its calls.
//
// The machine determines the instructions: dot products of pairs (product_pairs.h), or of tiles (product_tiles.h). The
// two give different bits.
#pragma once

#include <ATen/ops/empty.h>

#include "adapters.h"
#include "panels.h"
#include "product_pairs.h"
#include "product_tiles.h"
#include "vectors.h"

namespace tandem {

// Calls finish(row, panel, two vectors of sums) for all rows and panels. Only products of pairs prefetch `other`
// meanwhile: tiles already use the full memory bandwidth, and steps with prompts took up to a third longer with it.
template <class Finish>
void multiply(const at::Tensor& x, const at::Tensor& weight, ReadAhead* other, const Finish& finish) {
  const Panels panels(weight);
#if TANDEM_TILES
  if (has_tiles()) return multiply_by_tiles(data_of(x), x.size(0), panels, finish);
#endif
  multiply_pairs(data_of(x), x.size(0), panels, other, finish);
}

// One thread's share of such a product: all rows, at least one, and the panels in [begin, end). `after`: the panel that
// the thread reads afterwards; null: none.
template <class Finish>
void multiply_share(
    const bf16* x, int64_t T, const Panels& weight, int64_t begin, int64_t end, const char* after, const Finish& finish) {
#if TANDEM_TILES
  if (has_tiles()) return multiply_tiles_share(x, T, weight, begin, end, finish);
#endif
  multiply_pairs_share(x, T, weight, begin * row_blocks_of(T), end * row_blocks_of(T), nullptr, after, finish);
}

// One number for each output of the panels, if any.
using OfOutputs = std::optional<at::Tensor>;

inline void check_product(const at::Tensor& x, const at::Tensor& weight, const OfOutputs& scale, const OfOutputs& bias) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x [T, K], contiguous");
  TORCH_CHECK(Panels(weight).pairs * 2 == x.size(1), "weight in panels, of K inputs");
  TORCH_CHECK(scale.has_value() == (weight.scalar_type() == at::kChar), "scale: for a weight of int8, and for no other");
  TORCH_CHECK(!scale || (scale->is_contiguous() && scale->numel() == weight.size(0) * PANEL), "scale: one number an output of a panel");
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == weight.size(0) * PANEL), "bias: one number an output of a panel");
}

// A product's sums * scale + bias.
struct ScaleAndBias {
  const float* scale;
  const bf16* bias;

  ScaleAndBias(const OfOutputs& scale, const OfOutputs& bias)
      : scale(scale ? scale->data_ptr<float>() : nullptr), bias(bias ? data_of(*bias) : nullptr) {}

  void apply(int64_t panel, F16* sums) const {
    int64_t at = panel * PANEL;
    for (int i = 0; scale && i < 2; i++) sums[i] *= load<F16>(scale + at + i * LANES);
    for (int i = 0; bias && i < 2; i++) sums[i] += to_float(bias + at + i * LANES);
  }
};

inline void check_added(const AddedProduct* added, const at::Tensor& weight) {
  TORCH_CHECK(!added || added->num_sixteens == 2 * weight.size(0), "what is added must have the product's panels");
}

// Takes sums; writes a product's outputs [T, num_outputs], without the padding of the last panel.
struct Outputs {
  bf16* to;
  int64_t num_outputs;
  ScaleAndBias given;
  const Adding* adding = nullptr;

  void operator()(int64_t row, int64_t panel, F16* sums) const {
    int64_t at = panel * PANEL, left = num_outputs - at;
    given.apply(panel, sums);
    if (adding) adding->add(row, panel, sums);
    bf16 rounded[PANEL];
    bf16* y = left < PANEL ? rounded : to + row * num_outputs + at;
    store_bf16(y, sums[0]);
    store_bf16(y + LANES, sums[1]);
    if (left < PANEL) std::memcpy(to + row * num_outputs + at, rounded, left * sizeof(bf16));
  }
};

// x [T, K], weight in panels, scale and bias [panels * 32] -> [T, num_outputs]. `added` for `rows`: what adapters add, if
// any.
at::Tensor linear_ahead(
    const at::Tensor& x, const at::Tensor& weight, const OfOutputs& scale, const OfOutputs& bias, int64_t num_outputs,
    ReadAhead* ahead, const AddedProduct* added = nullptr, const AdapterRows* rows = nullptr) {
  check_product(x, weight, scale, bias);
  TORCH_CHECK((num_outputs + PANEL - 1) / PANEL == weight.size(0), "num_outputs must end in the last panel");
  check_added(added, weight);
  const Adding adding(added, rows, x);
  at::Tensor out = at::empty({x.size(0), num_outputs}, x.options());
  multiply(x, weight, ahead, Outputs{data_of(out), num_outputs, {scale, bias}, adding ? &adding : nullptr});
  return out;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const OfOutputs& scale, const OfOutputs& bias, int64_t num_outputs) {
  return linear_ahead(x, weight, scale, bias, num_outputs, nullptr);
}

// Like `linear` without a bias, but returns unrounded float32: [T, num_outputs]. For logits: near 25, bfloat16 has a
// resolution of only 1/8, and the two most likely tokens would often be equal.
at::Tensor linear_float(const at::Tensor& x, const at::Tensor& weight, const OfOutputs& scale, int64_t num_outputs) {
  check_product(x, weight, scale, std::nullopt);
  TORCH_CHECK((num_outputs + PANEL - 1) / PANEL == weight.size(0), "num_outputs must end in the last panel");
  at::Tensor out = at::empty({x.size(0), num_outputs}, x.options().dtype(at::kFloat));
  float* to = out.data_ptr<float>();
  const ScaleAndBias given(scale, std::nullopt);
  multiply(x, weight, nullptr, [&](int64_t row, int64_t panel, F16* sums) {
    int64_t at = panel * PANEL;
    given.apply(panel, sums);
    std::memcpy(to + row * num_outputs + at, sums, std::min(num_outputs - at, PANEL) * sizeof(float));
  });
  return out;
}

// x / (1 + exp(-at))
inline Sums times_sigmoid(Sums x, Sums at) {
  Sums shrinking = exp_of(at < 0.0f ? at : -at);  // exp(-|at|)
  Sums at_low = at < -87.0f ? Sums{} : shrinking;
  return x * (at < 0.0f ? at_low : broadcast(1.0f)) / (1.0f + shrinking);
}

// Where GELU takes its sigmoid, in the approximation by tanh: D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units",
// 2016; (1 + tanh(z)) / 2 is the sigmoid of 2 z.
inline Sums gelu_at(Sums gate) {
  Sums at = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
  Sums low = at < -100.0f ? broadcast(-100.0f) : at;  // not infinite
  return low > 100.0f ? broadcast(100.0f) : low;
}

// SiLU of a gate, or GELU, times `up`.
struct Gate {
  bool is_gelu;

  Sums operator()(Sums gate, Sums up) const { return rounded(times_sigmoid(gate, is_gelu ? gelu_at(gate) : gate)) * up; }
};

// gpt-oss' gate: gate * sigmoid(alpha * gate) * (up + 1), both clamped (engine/models/four_bit_experts.py).
struct ClampedGate {
  float alpha, limit;

  Sums operator()(Sums gate, Sums up) const {
    const Sums most = broadcast(limit);
    gate = gate > most ? most : gate;
    up = up > most ? most : up < -most ? -most : up;
    return times_sigmoid(gate, alpha * gate) * (up + 1.0f);
  }
};

// Takes sums of panels that hold 16 outputs of a gate and the corresponding 16 of `up`; writes activate(gate, up), both
// rounded before: [T, num_outputs].
template <class Activate>
struct ActivatedOutputs {
  bf16* to;
  int64_t num_outputs;
  ScaleAndBias given;
  Activate activate;
  const Adding* adding = nullptr;

  void operator()(int64_t row, int64_t panel, F16* sums) const {
    int64_t at = panel * LANES, left = num_outputs - at;
    given.apply(panel, sums);
    if (adding) adding->add(row, panel, sums);
    bf16 of_last[LANES];
    bf16* y = left < LANES ? of_last : to + row * num_outputs + at;
    for (int i = 0; i < LANES; i += REGISTER) {
      const float* both = reinterpret_cast<const float*>(sums) + i;
      store_bf16(y + i, activate(rounded(load<Sums>(both)), rounded(load<Sums>(both + LANES))));
    }
    if (left < LANES) std::memcpy(to + row * num_outputs + at, y, left * sizeof(bf16));
  }
};

// silu(x @ gate.T) * (x @ up.T), or GELU.
at::Tensor gated_linear_ahead(
    const at::Tensor& x, const at::Tensor& weight, const OfOutputs& scale, const OfOutputs& bias, int64_t num_outputs,
    bool is_gelu, ReadAhead* ahead, const AddedProduct* added = nullptr, const AdapterRows* rows = nullptr) {
  check_product(x, weight, scale, bias);
  TORCH_CHECK((num_outputs + LANES - 1) / LANES == weight.size(0), "num_outputs must end in the last panel");
  check_added(added, weight);
  const Adding adding(added, rows, x);
  at::Tensor out = at::empty({x.size(0), num_outputs}, x.options());
  const Gate gate{is_gelu};
  multiply(x, weight, ahead, ActivatedOutputs<Gate>{data_of(out), num_outputs, {scale, bias}, gate, adding ? &adding : nullptr});
  return out;
}

at::Tensor gated_linear(
    const at::Tensor& x, const at::Tensor& weight, const OfOutputs& scale, const OfOutputs& bias, int64_t num_outputs,
    bool is_gelu) {
  return gated_linear_ahead(x, weight, scale, bias, num_outputs, is_gelu, nullptr);
}

// `linear` and `gated_linear` with adapters. adapter_ids [T] int32: the adapter of each row, 0 for none.
at::Tensor adapted_linear(
    const c10::intrusive_ptr<AddedProduct>& added, const at::Tensor& x, const at::Tensor& weight, const OfOutputs& scale,
    const OfOutputs& bias, int64_t num_outputs, const at::Tensor& adapter_ids) {
  const AdapterRows rows(adapter_ids);
  return linear_ahead(x, weight, scale, bias, num_outputs, nullptr, added.get(), &rows);
}

at::Tensor adapted_gated_linear(
    const c10::intrusive_ptr<AddedProduct>& added, const at::Tensor& x, const at::Tensor& weight, const OfOutputs& scale,
    const OfOutputs& bias, int64_t num_outputs, bool is_gelu, const at::Tensor& adapter_ids) {
  const AdapterRows rows(adapter_ids);
  return gated_linear_ahead(x, weight, scale, bias, num_outputs, is_gelu, nullptr, added.get(), &rows);
}

}  // namespace tandem
