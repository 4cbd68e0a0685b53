// A mixture of experts in place of a layer's feed-forward (engine/models/experts.py): scores, the choice, the weighted sum.
#pragma once

#include <torch/custom_class.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "experts.h"
#include "matmul.h"

namespace tandem {

// How a token's experts are chosen (engine/models/experts_config.py: ExpertsConfig).
struct ExpertChoice {
  int64_t num_experts, num_chosen, num_groups, num_chosen_groups;
  bool norms_weights;  // a token's weights are made to add up to 1 before `scaling`
  float scaling;
};

struct Mixture : torch::CustomClassHolder {
  // scores: the weight of all experts' scores, in panels. bias [num_experts] float32, of the choice alone: scores are
  // then sigmoids; without one, a softmax.
  Mixture(
      at::Tensor scores, int64_t num_experts, int64_t num_chosen, int64_t num_groups, int64_t num_chosen_groups,
      bool norms_weights, double scaling, std::optional<at::Tensor> bias, c10::intrusive_ptr<Experts> experts)
      : scores_(std::move(scores)), bias_(std::move(bias)),
        choice_{num_experts, num_chosen, num_groups, num_chosen_groups, norms_weights, float(scaling)}, experts_(std::move(experts)) {
    TORCH_CHECK(num_groups >= 1 && num_experts % num_groups == 0, "experts: groups must be equally large");
    TORCH_CHECK(num_chosen_groups >= 1 && num_chosen_groups <= num_groups, "groups: 1 <= chosen <= all");
    const int64_t most = num_experts / num_groups * num_chosen_groups;
    TORCH_CHECK(num_chosen >= 1 && num_chosen <= most, "experts: 1 <= chosen <= all of the chosen groups");
    TORCH_CHECK(!bias_ || num_chosen_groups == num_groups || num_experts / num_groups >= 2, "groups: their merit is that of two experts");
    TORCH_CHECK(!bias_ || (bias_->is_contiguous() && bias_->scalar_type() == at::kFloat && bias_->numel() == num_experts), "bias [experts], float32");
  }

  // x [T, D] -> [T, D]
  at::Tensor forward(const at::Tensor& x) const {
    const int64_t T = x.size(0), A = choice_.num_chosen, E = choice_.num_experts;
    const at::Tensor logits = linear_float(x, scores_, std::nullopt, E);
    std::vector<int64_t> experts(T * A);
    std::vector<float> weights(T * A);
    at::parallel_for(0, T, 16, [&](int64_t begin, int64_t end) {
      std::vector<float> scores(E + REGISTER), preference(E);
      for (int64_t t = begin; t < end; t++)
        choose(logits.const_data_ptr<float>() + t * E, scores.data(), preference.data(), experts.data() + t * A, weights.data() + t * A);
    });
    return experts_->of_chosen(x, experts.data(), weights.data(), A);
  }

 private:
  // A token's experts, the most preferred first (of equal ones the first), and their weights. `scores` has room for a
  // number of each expert, and a register more.
  void choose(const float* logits, float* scores, float* preference, int64_t* experts, float* weights) const {
    const int64_t A = choice_.num_chosen, E = choice_.num_experts;
    const float* bias = bias_ ? bias_->const_data_ptr<float>() : nullptr;
    std::copy_n(logits, E, scores);
    if (bias) {
      for (int64_t e = 0; e < E; e += REGISTER) store(scores + e, times_sigmoid(broadcast(1.0f), load<Sums>(scores + e)));
      for (int64_t e = 0; e < E; e++) preference[e] = scores[e] + bias[e];
    } else {
      std::copy_n(logits, E, preference);
    }
    leave_best_groups(preference, bias ? 2 : 1);
    take_best(preference, E, A, experts);
    if (!bias) {
      for (int64_t e = 0; e < E; e++) scores[e] = logits[e] - logits[experts[0]];
      for (int64_t e = 0; e < E; e += REGISTER) store(scores + e, exp_of(load<Sums>(scores + e)));
    }
    float total = 0;
    if (choice_.norms_weights) for (int64_t a = 0; a < A; a++) total += scores[experts[a]];
    else if (!bias) for (int64_t e = 0; e < E; e++) total += scores[e];
    else total = 1;
    total = std::max(total, SMALLEST_SUM);
    for (int64_t a = 0; a < A; a++) weights[a] = scores[experts[a]] / total * choice_.scaling;
  }

  // The indices of the `count` largest of n numbers, the largest first, of equal ones the first.
  static void take_best(const float* numbers, int64_t n, int64_t count, int64_t* to) {
    for (int64_t i = 0; i < count; i++) {
      int64_t best = -1;
      for (int64_t e = 0; e < n; e++)
        if ((best < 0 || numbers[e] > numbers[best]) && std::find(to, to + i, e) == to + i) best = e;
      to[i] = best;
    }
  }

  // Sets the preferences of all experts outside the best groups to minus infinity. A group's merit is the sum of its
  // `num_telling` most preferred.
  void leave_best_groups(float* preference, int64_t num_telling) const {
    const int64_t G = choice_.num_groups, size = choice_.num_experts / G;
    if (choice_.num_chosen_groups == G) return;
    std::vector<float> merit(G);
    std::vector<int64_t> best(std::max(G, num_telling));
    for (int64_t g = 0; g < G; g++) {
      take_best(preference + g * size, size, num_telling, best.data());
      for (int64_t i = 0; i < num_telling; i++) merit[g] += preference[g * size + best[i]];
    }
    take_best(merit.data(), G, choice_.num_chosen_groups, best.data());
    for (int64_t g = 0; g < G; g++)
      if (std::find(best.data(), best.data() + choice_.num_chosen_groups, g) == best.data() + choice_.num_chosen_groups)
        std::fill_n(preference + g * size, size, -std::numeric_limits<float>::infinity());
  }

  static constexpr float SMALLEST_SUM = 1e-20f;  // avoids a division by zero if scores add up to zero

  at::Tensor scores_;
  std::optional<at::Tensor> bias_;
  ExpertChoice choice_;
  c10::intrusive_ptr<Experts> experts_;
};

}  // namespace tandem
