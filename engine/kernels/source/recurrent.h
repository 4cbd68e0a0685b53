// Layers that keep a state: what they have in common. They work on the rows of the engine's states
// (engine/models/recurrent_states.py). Each sequence is computed by itself, token after token, so its numbers depend
// neither on the others nor on the chunks that its prompt comes in.
#pragma once

#include <ATen/ops/empty.h>

#include "vectors.h"

namespace tandem {

// A step's sequences: see RecurrentStep.
struct Sequences {
  const int64_t *firsts, *lengths, *slots;
  const bool* is_new;
  int64_t num_seqs;

  Sequences(const at::Tensor& firsts, const at::Tensor& lengths, const at::Tensor& slots, const at::Tensor& is_new)
      : firsts(firsts.const_data_ptr<int64_t>()),
        lengths(lengths.const_data_ptr<int64_t>()),
        slots(slots.const_data_ptr<int64_t>()),
        is_new(is_new.const_data_ptr<bool>()),
        num_seqs(firsts.numel()) {
    TORCH_CHECK(lengths.numel() == num_seqs && slots.numel() == num_seqs && is_new.numel() == num_seqs, "one number for each sequence");
    TORCH_CHECK(
        firsts.is_contiguous() && lengths.is_contiguous() && slots.is_contiguous() && is_new.is_contiguous(), "contiguous");
  }

  // The sequences lie in T rows one after the other, and their slots among R rows of states.
  void check(int64_t T, int64_t R) const {
    int64_t next = 0;
    for (int64_t s = 0; s < num_seqs; s++) {
      TORCH_CHECK(firsts[s] == next && lengths[s] > 0 && 0 <= slots[s] && slots[s] < R, "sequence ", s);
      next += lengths[s];
    }
    TORCH_CHECK(next == T, "sequences of ", next, " tokens, for ", T);
  }
};

constexpr int64_t CHANNELS = 16 * REGISTER;  // of an item of the convolution
constexpr int64_t MOST_TAPS = 8;

inline Sums load_floats(const bf16* p) {
  float f[REGISTER];
  for (int i = 0; i < REGISTER; i++) f[i] = to_float(p[i]);
  return load<Sums>(f);
}

inline Sums silu(Sums x) {
  Sums shrinking = exp_of(x < 0.0f ? x : -x);  // exp(-|x|)
  return x * (x < 0.0f ? shrinking : broadcast(1.0f)) / (shrinking + 1.0f);
}

// The convolution, or SiLU of it: [T, C]. x [T, C], weight [C, J] and bias [C] contiguous; inputs [R, J - 1, C], of which
// each sequence's row holds its last inputs, and does so afterwards.
at::Tensor convolve(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& inputs,
    const at::Tensor& firsts, const at::Tensor& lengths, const at::Tensor& slots, const at::Tensor& is_new, bool has_silu) {
  int64_t T = x.size(0), C = x.size(1), J = weight.size(1), kept = J - 1;
  Sequences seqs(firsts, lengths, slots, is_new);
  seqs.check(T, inputs.size(0));
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && weight.size(0) == C, "x [T, C] and weight [C, J], contiguous");
  TORCH_CHECK(
      inputs.dim() == 3 && inputs.size(1) == kept && inputs.size(2) == C && inputs.stride(2) == 1 && inputs.stride(1) == C,
      "inputs [R, J - 1, C], with contiguous rows");
  TORCH_CHECK(C % REGISTER == 0 && 1 <= J && J <= MOST_TAPS, C, " channels, ", J, " taps");
  TORCH_CHECK(!bias || (bias->numel() == C && bias->is_contiguous()), "bias [C], contiguous");
  at::Tensor out = at::empty({T, C}, x.options());
  const bf16 *xp = data_of(x), *wp = data_of(weight), *bp = bias ? data_of(*bias) : nullptr;
  bf16 *op = data_of(out), *ip = data_of(inputs);
  int64_t items = (C + CHANNELS - 1) / CHANNELS, row_stride = inputs.stride(0);
  for_each_item(seqs.num_seqs * items, [&](int64_t item) {
    int64_t s = item / items, begin = item % items * CHANNELS, end = std::min(C, begin + CHANNELS);
    bf16* state = ip + seqs.slots[s] * row_stride;
    const bf16* own = xp + seqs.firsts[s] * C;
    const bf16 none[REGISTER] = {};
    bf16 last[MOST_TAPS][CHANNELS];
    // The input at a place counted from the sequence's first token of this step.
    auto input = [&](int64_t place, int64_t c) {
      if (place >= 0) return own + place * C + c;
      return seqs.is_new[s] ? none : static_cast<const bf16*>(state + (place + kept) * C + c);
    };
    for (int64_t c = begin; c < end; c += REGISTER) {
      Sums w[MOST_TAPS];
      for (int64_t j = 0; j < J; j++)
        for (int i = 0; i < REGISTER; i++) w[j][i] = to_float(wp[(c + i) * J + j]);
      for (int64_t t = 0; t < seqs.lengths[s]; t++) {
        Sums sum = bp ? load_floats(bp + c) : Sums{};
        for (int64_t j = 0; j < J; j++) sum += load_floats(input(t + j - kept, c)) * w[j];
        store_bf16(op + (seqs.firsts[s] + t) * C + c, has_silu ? silu(sum) : sum);
      }
      for (int64_t j = 0; j < kept; j++)
        std::memcpy(&last[j][c - begin], input(seqs.lengths[s] + j - kept, c), sizeof(none));
    }
    for (int64_t j = 0; j < kept; j++) std::memcpy(state + j * C + begin, last[j], (end - begin) * sizeof(bf16));
  });
  return out;
}

}  // namespace tandem
