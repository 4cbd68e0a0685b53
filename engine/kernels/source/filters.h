// The filters of a draw, for one row: min_p, top_k, top_p (engine/sampling/sampler.py, steps 7 to 9).
//
// Each filter determines the smallest weight that is kept, exp((logit - largest) / temperature). Weights are compared
// in float64: tokens as probable as the last one kept are kept, too. The sum for top_p is in float32, so a token at the
// very edge may be kept where float64 would drop it, or the reverse.
#pragma once

#include <functional>
#include <numeric>
#include <vector>

#include "vectors.h"

namespace tandem {

constexpr int64_t AT_ONCE = 4 * LANES;  // several in one step, because each comparison waits for the one before

inline bool any(Ints x) {
  int32_t bits = 0;
  for (int i = 0; i < REGISTER; i++) bits |= x[i];
  return bits != 0;
}

struct Filters {
  int64_t top_k;  // 0: none
  double top_p, min_p;
};

// The logits of one row. They must not include NaN, and the largest must be finite. Logits of filtered tokens become
// -infinity.
class FilteredRow {
 public:
  FilteredRow(float* logits, int64_t size, float largest, double temperature)
      : logits_(logits), size_(size), largest_(largest), temperature_(temperature),
        exponent_(float(std::min(1.0 / temperature, 1e30)) * LOG2_E) {}

  void apply(const Filters& filters) {
    double least = filters.min_p;
    if (filters.top_k > 0 && filters.top_k < size_) least = std::max(least, weight(kth_largest(filters.top_k)));
    drop_below(least);
    if (filters.top_p < 1) drop_below(weight(last_of_nucleus(filters.top_p)));
  }

 private:
  static constexpr int32_t NUM_BINS = 1024;

  struct Token {
    float logit, weight;
  };

  double weight(float logit) const { return std::exp((double(logit) - double(largest_)) / temperature_); }

  // Weights of one register of tokens, in float32.
  Sums weights(Sums logits) const {
    Sums found = exp2_of((logits - largest_) * exponent_);
    return logits > -INFINITY ? found : Sums{};
  }

  Ints bin(Sums logits) const {
    const Sums octaves = (largest_ - logits) * (8 * exponent_), last = broadcast(NUM_BINS - 1);
    return __builtin_convertvector(octaves < last ? octaves : last, Ints);
  }

  // Calls work(64 logits) for the whole row, with -infinity beyond its end.
  template <class Work>
  void read(const Work& work) const {
    int64_t i = 0;
    for (; i + AT_ONCE <= size_; i += AT_ONCE) work(logits_ + i);
    if (i == size_) return;
    float rest[AT_ONCE];
    std::fill_n(rest, AT_ONCE, -INFINITY);
    std::copy(logits_ + i, logits_ + size_, rest);
    work(rest);
  }

  // Returns the k-th largest logit of the row. Keeps some of the largest logits so far, and skips 64 at a time if all
  // are below the k-th of them.
  float kth_largest(int64_t k) const {
    std::vector<float> found;
    float bound = -INFINITY;
    auto keep_k = [&] {
      std::nth_element(found.begin(), found.begin() + k - 1, found.end(), std::greater<float>());
      found.resize(k);
      bound = found[k - 1];
    };
    read([&](const float* logits) {
      Ints hits{};
      for (int i = 0; i < AT_ONCE; i += REGISTER) hits |= load<Sums>(logits + i) > broadcast(bound);
      if (!any(hits)) return;
      for (int i = 0; i < AT_ONCE; i++)
        if (logits[i] > bound) found.push_back(logits[i]);
      if (int64_t(found.size()) >= 2 * k + AT_ONCE) keep_k();
    });
    if (int64_t(found.size()) < k) return -INFINITY;
    keep_k();
    return bound;
  }

  // Returns the logit of the least likely token of the nucleus: the smallest set of most likely tokens that has top_p
  // of the remaining mass. Tokens are first binned by weight, in eighths of a power of 2. The masses of the bins show
  // which bin holds that token, and only the tokens of this bin are examined one by one.
  float last_of_nucleus(double top_p) const {
    std::array<double, NUM_BINS> masses{};
    read([&](const float* logits) {
      float found[AT_ONCE];
      int32_t bins[AT_ONCE];
      Ints hits{};
      for (int i = 0; i < AT_ONCE; i += REGISTER) {
        const Sums x = load<Sums>(logits + i);
        hits |= x > -INFINITY;
        store(found + i, weights(x));
        store(bins + i, bin(x));
      }
      if (!any(hits)) return;
      for (int i = 0; i < AT_ONCE; i++) masses[bins[i]] += found[i];
    });
    double wanted = top_p * std::accumulate(masses.begin(), masses.end(), 0.0);
    int32_t at = 0;
    for (; at + 1 < NUM_BINS && masses[at] < wanted; at++) wanted -= masses[at];
    std::vector<Token> tokens;
    read([&](const float* logits) {
      Ints hits{};
      for (int i = 0; i < AT_ONCE; i += REGISTER) hits |= bin(load<Sums>(logits + i)) == at;
      if (!any(hits)) return;
      for (int i = 0; i < AT_ONCE; i += REGISTER) {
        const Sums x = load<Sums>(logits + i), w = weights(x);
        const Ints bins = bin(x);
        for (int j = 0; j < REGISTER; j++)
          if (bins[j] == at && x[j] > -INFINITY) tokens.push_back({x[j], w[j]});
      }
    });
    return tokens.empty() ? -INFINITY : last_within(tokens.begin(), tokens.end(), wanted);
  }

  // Returns the logit down to which the tokens (at least one) have the mass `wanted`, or the smallest logit if all of
  // them have less. Partitions without sorting, like `nth_element`.
  template <class Place>
  static float last_within(Place begin, Place end, double wanted) {
    const auto mass_of = [](Place from, Place to) {
      double mass = 0;
      for (; from != to; ++from) mass += from->weight;
      return mass;
    };
    while (true) {
      const float a = begin->logit, b = begin[(end - begin) / 2].logit, c = end[-1].logit;
      const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
      const Place first = std::partition(begin, end, [&](const Token& token) { return token.logit > pivot; });
      const Place last = std::partition(first, end, [&](const Token& token) { return token.logit == pivot; });
      const double above = mass_of(begin, first), here = mass_of(first, last);
      if (first != begin && above >= wanted) {
        end = first;
      } else if (last == end || above + here >= wanted) {
        return pivot;
      } else {
        wanted -= above + here;
        begin = last;
      }
    }
  }

  // Drops the tokens whose weight is below `least`. Decides by the logit, except for tokens so close that rounding
  // matters.
  void drop_below(double least) {
    if (!(least > 0)) return;
    const double exponent = std::log(least), at = double(largest_) + temperature_ * exponent;
    const double near = 1e-15 * (temperature_ * (1 - exponent) + std::abs(double(largest_)));
    const float surely_out = std::nextafter(float(at - near), -INFINITY), surely_in = std::nextafter(float(at + near), INFINITY);
    int64_t i = 0;
    for (; i + REGISTER <= size_; i += REGISTER) {
      const Sums x = load<Sums>(logits_ + i);
      store(logits_ + i, x < surely_out ? broadcast(-INFINITY) : x);
      if (any((x >= surely_out) & (x < surely_in))) drop_each(i, i + REGISTER, least);
    }
    drop_each(i, size_, least);
  }

  void drop_each(int64_t begin, int64_t end, double least) {
    for (int64_t i = begin; i < end; i++)
      if (weight(logits_[i]) < least) logits_[i] = -INFINITY;
  }

  float* const logits_;
  const int64_t size_;
  const float largest_;
  const double temperature_;
  const float exponent_;  // factor that turns a logit's distance from the largest into an exponent of 2
};

}  // namespace tandem
