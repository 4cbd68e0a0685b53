// A mixture of experts in place of a layer's feed-forward (engine/models/experts.py): scores, the choice, the weighted sum.
#pragma once

#include <torch/custom_class.h>

#include <algorithm>
#include <vector>

#include "experts.h"
#include "matmul.h"

namespace tandem {

struct Mixture : torch::CustomClassHolder {
  // scores: the weight of all experts' scores, in panels. norms_weights: a token's weights are made to add up to 1.
  Mixture(at::Tensor scores, int64_t num_experts, int64_t num_chosen, bool norms_weights, c10::intrusive_ptr<Experts> experts)
      : scores_(std::move(scores)), num_experts_(num_experts), num_chosen_(num_chosen), norms_weights_(norms_weights), experts_(std::move(experts)) {
    TORCH_CHECK(num_chosen >= 1 && num_chosen <= num_experts, "experts: 1 <= chosen <= all");
  }

  // x [T, D] -> [T, D]
  at::Tensor forward(const at::Tensor& x) const {
    const int64_t T = x.size(0), A = num_chosen_;
    const at::Tensor logits = linear_float(x, scores_, std::nullopt, num_experts_);
    std::vector<int64_t> experts(T * A);
    std::vector<float> weights(T * A);
    at::parallel_for(0, T, 16, [&](int64_t begin, int64_t end) {
      std::vector<float> powers(num_experts_ + REGISTER);
      for (int64_t t = begin; t < end; t++)
        choose(logits.const_data_ptr<float>() + t * num_experts_, experts.data() + t * A, weights.data() + t * A, powers.data());
    });
    return experts_->of_chosen(x, experts.data(), weights.data(), A);
  }

 private:
  // A token's experts, the most likely first (of equal ones the first), and their softmax over all experts. `powers` has
  // room for a number of each expert, and a register more.
  void choose(const float* logits, int64_t* experts, float* weights, float* powers) const {
    for (int64_t a = 0; a < num_chosen_; a++) {
      int64_t best = -1;
      for (int64_t e = 0; e < num_experts_; e++)
        if ((best < 0 || logits[e] > logits[best]) && std::find(experts, experts + a, e) == experts + a) best = e;
      experts[a] = best;
    }
    for (int64_t e = 0; e < num_experts_; e++) powers[e] = logits[e] - logits[experts[0]];
    for (int64_t e = 0; e < num_experts_; e += REGISTER) store(powers + e, exp_of(load<Sums>(powers + e)));
    float total = 0;
    if (norms_weights_) for (int64_t a = 0; a < num_chosen_; a++) total += powers[experts[a]];
    else for (int64_t e = 0; e < num_experts_; e++) total += powers[e];
    for (int64_t a = 0; a < num_chosen_; a++) weights[a] = powers[experts[a]] / total;
  }

  at::Tensor scores_;
  int64_t num_experts_, num_chosen_;
  bool norms_weights_;
  c10::intrusive_ptr<Experts> experts_;
};

}  // namespace tandem
