// The feed-forwards of a mixture's experts, for rows that are sorted by expert: first the products of all gates, then all
// the others. Each thread has a share of all experts' panels, so that it is busy however few rows an expert has.
#pragma once

#include <torch/custom_class.h>

#include <string>
#include <vector>

#include "matmul.h"

namespace tandem {

struct Experts : torch::CustomClassHolder {
  // num_inner: the intermediate size. activation: "silu", "gelu_tanh", or "clamped", for which alone alpha and limit are.
  Experts(int64_t num_inner, int64_t num_outputs, const std::string& activation, double alpha, double limit)
      : num_inner_(num_inner), num_outputs_(num_outputs), activation_(activation), clamped_{float(alpha), float(limit)} {
    TORCH_CHECK(activation == "silu" || activation == "gelu_tanh" || activation == "clamped", "activation: ", activation);
  }

  // One more expert: the weights of a gate and `up`, 16 outputs of each in a panel, and those of `down`.
  void add(
      const at::Tensor& gated, const OfOutputs& gated_scale, const OfOutputs& gated_bias, const at::Tensor& down,
      const OfOutputs& down_scale, const OfOutputs& down_bias) {
    TORCH_CHECK((num_inner_ + LANES - 1) / LANES == gated.size(0), "the intermediate size must end in the last panel");
    TORCH_CHECK((num_outputs_ + PANEL - 1) / PANEL == down.size(0), "the outputs must end in the last panel");
    gated_.push_back({gated, gated_scale, gated_bias});
    down_.push_back({down, down_scale, down_bias});
  }

  // Of all weights.
  int64_t num_bytes() const {
    int64_t bytes = 0;
    for (const auto* products : {&gated_, &down_})
      for (const Product& each : *products) bytes += int64_t(each.weight.nbytes());
    return bytes;
  }

  // x [R, D], ends [E] int32: where an expert's rows end and the next one's begin -> [R, num_outputs].
  at::Tensor forward(const at::Tensor& x, const at::Tensor& ends) const {
    TORCH_CHECK(ends.is_contiguous() && ends.scalar_type() == at::kInt && ends.numel() == int64_t(gated_.size()), "ends [E], int32");
    return multiplied(x, rows_of(ends.const_data_ptr<int32_t>(), x.size(0)));
  }

  // The weighted sum of each token's experts, added up in the order in which they were chosen. x [T, D]; experts [T, A]
  // int64; weights [T, A] float32 -> [T, num_outputs].
  at::Tensor of_chosen(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights) const {
    TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x [T, D], contiguous");
    TORCH_CHECK(
        experts.dim() == 2 && experts.is_contiguous() && experts.scalar_type() == at::kLong && experts.size(0) == x.size(0),
        "experts [T, A], int64");
    TORCH_CHECK(weights.is_contiguous() && weights.scalar_type() == at::kFloat && weights.sizes() == experts.sizes(), "weights [T, A], float32");
    return of_chosen(x, experts.const_data_ptr<int64_t>(), weights.const_data_ptr<float>(), experts.size(1));
  }

  at::Tensor of_chosen(const at::Tensor& x, const int64_t* experts, const float* weights, int64_t A) const {
    const int64_t T = x.size(0), D = x.size(1), R = T * A, E = int64_t(gated_.size());
    std::vector<int32_t> ends(E), next(E), place(R);
    for (int64_t r = 0; r < R; r++) {
      TORCH_CHECK(experts[r] >= 0 && experts[r] < E, "an expert must be in [0, ", E, "), is ", experts[r]);
      ends[experts[r]]++;
    }
    for (int64_t e = 0, before = 0; e < E; e++) next[e] = int32_t(before), before += ends[e], ends[e] = int32_t(before);
    for (int64_t r = 0; r < R; r++) place[r] = next[experts[r]]++;
    at::Tensor sorted = at::empty({R, D}, x.options()), out = at::empty({T, num_outputs_}, x.options());
    const auto each_token = [&](const auto& work) {
      at::parallel_for(0, T, std::max<int64_t>(1, 16384 / (A * D + 1)), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) work(t);
      });
    };
    each_token([&](int64_t t) {
      for (int64_t a = 0; a < A; a++) std::memcpy(data_of(sorted) + place[t * A + a] * D, data_of(x) + t * D, D * sizeof(bf16));
    });
    const at::Tensor y = multiplied(sorted, rows_of(ends.data(), R));
    each_token([&](int64_t t) { sum_up(data_of(y), place.data() + t * A, weights + t * A, A, data_of(out) + t * num_outputs_); });
    return out;
  }

 private:
  // To read a panel takes as long as to multiply it with this many rows.
  static constexpr int64_t ROWS_WHILE_READING = 8;

  struct Product {
    at::Tensor weight;
    OfOutputs scale, bias;
  };

  struct Rows {
    int64_t expert, first, num;
    int64_t cost() const { return std::max(num, ROWS_WHILE_READING); }  // of a panel
  };

  at::Tensor multiplied(const at::Tensor& x, const std::vector<Rows>& rows) const {
    at::Tensor h = at::empty({x.size(0), num_inner_}, x.options()), out = at::empty({x.size(0), num_outputs_}, x.options());
    if (activation_ == "clamped") multiply_gates(x, rows, clamped_, h);
    else multiply_gates(x, rows, Gate{activation_ == "gelu_tanh"}, h);
    multiply_all(h, down_, rows, [&](const Product& product, int64_t first) {
      return Outputs{data_of(out) + first * num_outputs_, num_outputs_, {product.scale, product.bias}};
    });
    return out;
  }

  // Of experts that have any.
  std::vector<Rows> rows_of(const int32_t* ends, int64_t num_rows) const {
    std::vector<Rows> rows;
    int64_t first = 0;
    for (int64_t e = 0; e < int64_t(gated_.size()); e++) {
      TORCH_CHECK(first <= ends[e] && ends[e] <= num_rows, "ends must not fall, nor be more than there are rows");
      if (first < ends[e]) rows.push_back({e, first, ends[e] - first});
      first = ends[e];
    }
    TORCH_CHECK(first == num_rows, "each row must have an expert");
    return rows;
  }

  // to[i] = the sum of weights[a] * y[rows[a]][i], in float32.
  void sum_up(const bf16* y, const int32_t* rows, const float* weights, int64_t A, bf16* to) const {
    constexpr int64_t AT_ONCE = 64;
    for (int64_t first = 0; first < num_outputs_; first += AT_ONCE) {
      const int64_t count = std::min(AT_ONCE, num_outputs_ - first);
      float sums[AT_ONCE] = {};
      for (int64_t a = 0; a < A; a++) {
        const bf16* row = y + rows[a] * num_outputs_ + first;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) sums[i] += weights[a] * to_float(row[i]);
      }
#pragma omp simd
      for (int64_t i = 0; i < count; i++) to[first + i] = to_bf16(sums[i]);
    }
  }

  template <class Activate>
  void multiply_gates(const at::Tensor& x, const std::vector<Rows>& rows, const Activate& activate, const at::Tensor& h) const {
    multiply_all(x, gated_, rows, [&](const Product& product, int64_t first) {
      bf16* to = data_of(h) + first * num_inner_;
      return ActivatedOutputs<Activate>{to, num_inner_, {product.scale, product.bias}, activate};
    });
  }

  // outputs_of(product, its first row): what takes the sums of an expert's product.
  template <class OutputsOf>
  static void multiply_all(
      const at::Tensor& x, const std::vector<Product>& products, const std::vector<Rows>& rows, const OutputsOf& outputs_of) {
    int64_t total = 0;
    for (const Rows& each : rows) {
      const Product& product = products[each.expert];
      check_product(x, product.weight, product.scale, product.bias);
      total += product.weight.size(0) * each.cost();
    }
    const int64_t num_shares = at::get_num_threads();
    for_each_range(num_shares, [&](int64_t first_share, int64_t end_share) {
      const int64_t begin = total * first_share / num_shares, end = total * end_share / num_shares;
      struct Part {
        const Rows* rows;
        int64_t first, last;  // panels
      };
      std::vector<Part> parts;
      int64_t before = 0;  // the cost of all experts before
      for (const Rows& each : rows) {
        const int64_t num_panels = products[each.expert].weight.size(0);
        const auto panels_before = [&](int64_t cost) {
          return std::clamp<int64_t>((cost - before + each.cost() - 1) / each.cost(), 0, num_panels);
        };
        const int64_t first = begin > before ? panels_before(begin) : 0, last = end > before ? panels_before(end) : 0;
        if (first < last) parts.push_back({&each, first, last});
        before += num_panels * each.cost();
      }
      for (size_t i = 0; i < parts.size(); i++) {
        const auto& [of, first, last] = parts[i];
        const Product& product = products[of->expert];
        const char* after = i + 1 < parts.size() ? Panels(products[parts[i + 1].rows->expert].weight).at(parts[i + 1].first, 0) : nullptr;
        multiply_share(
            data_of(x) + of->first * x.size(1), of->num, Panels(product.weight), first, last, after, outputs_of(product, of->first));
      }
    });
  }

  int64_t num_inner_, num_outputs_;
  std::string activation_;
  ClampedGate clamped_;
  std::vector<Product> gated_, down_;
};

}  // namespace tandem
