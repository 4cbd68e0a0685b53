// Choosing the next token: the largest logit, or a draw among all (engine/sampling/sampler.py says what a draw is).
#pragma once

#include <ATen/ops/empty.h>

#include <vector>

#include "vectors.h"

namespace tandem {

typedef uint64_t W16 __attribute__((vector_size(128)));

// Philox4x32-10 (engine/sampling/random.py) of 16 counters (block.., 0, position, 0): word j of lane i is of token
// 4 * (block + i) + j.
inline void philox(U16 c[4], uint64_t seed) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    W16 p0 = __builtin_convertvector(c[0], W16) * uint64_t(0xD2511F53), p1 = __builtin_convertvector(c[2], W16) * uint64_t(0xCD9E8D57);
    U16 high0 = __builtin_convertvector(p0 >> 32, U16), high1 = __builtin_convertvector(p1 >> 32, U16);
    c[0] = high1 ^ c[1] ^ k0;
    c[1] = __builtin_convertvector(p1, U16);
    c[2] = high0 ^ c[3] ^ k1;
    c[3] = __builtin_convertvector(p0, U16);
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
}

// log(x) of normal positive x, to some 1e-6 of itself or of 1: exponent, and atanh series of the mantissa around 1.
inline F16 log_of(F16 x) {
  I16 bits = (I16)x - 0x3f3504f3;  // so that the mantissa is in [sqrt(0.5), sqrt(2))
  F16 exponent = __builtin_convertvector(bits >> 23, F16);
  F16 m = (F16)((bits & 0x007fffff) + 0x3f3504f3);
  F16 t = (m - 1.0f) / (m + 1.0f), t2 = t * t;
  F16 series = 2.0f / 9.0f + F16{};
  series = series * t2 + 2.0f / 7.0f;
  series = series * t2 + 2.0f / 5.0f;
  series = series * t2 + 2.0f / 3.0f;
  series = series * t2 + 2.0f;
  return exponent * 0.693147181f + t * series;
}

constexpr int64_t AT_ONCE = 4 * LANES;  // what one is compared with waits for the one before: several beside each other

inline bool any(Ints x) {
  int32_t bits = 0;
  for (int i = 0; i < REGISTER; i++) bits |= x[i];
  return bits != 0;
}

// The largest of n numbers; -infinity of none. Written out: compilers leave a loop over `std::max` as it is.
inline float largest_of(const float* x, int64_t n, bool& has_nan) {
  constexpr int N = AT_ONCE / REGISTER;
  Sums most[N];
  Ints nans{};
  for (Sums& each : most) each = broadcast(-INFINITY);
  int64_t i = 0;
  for (; i + AT_ONCE <= n; i += AT_ONCE) {
    for (int j = 0; j < N; j++) {
      Sums v = load<Sums>(x + i + j * REGISTER);
      most[j] = v > most[j] ? v : most[j];
      nans |= v != v;
    }
  }
  has_nan = any(nans);
  float largest = -INFINITY;
  for (const Sums& each : most) {
    for (int lane = 0; lane < REGISTER; lane++) largest = std::max(largest, each[lane]);
  }
  for (; i < n; i++) {
    has_nan |= x[i] != x[i];
    largest = std::max(largest, x[i]);
  }
  return largest;
}

// Where `value`, which is there, comes first.
inline int64_t first_of(const float* x, int64_t n, float value) {
  int64_t i = 0;
  for (; i + AT_ONCE <= n; i += AT_ONCE) {
    Ints hits{};
    for (int j = 0; j < AT_ONCE; j += REGISTER) hits |= load<Sums>(x + i + j) == value;
    if (any(hits)) break;
  }
  return std::find(x + i, x + n, value) - x;
}

// One token of a row at random: engine/sampling/sampler.py, step 9, without filters. Scores of all in float32, of those that come
// near the best in float64. -1 where a logit is a NaN.
int64_t race(const float* logits, int64_t V, double temperature, uint64_t seed, uint32_t position, std::vector<float>& scores) {
  bool has_nan;
  float largest = largest_of(logits, V, has_nan);
  if (has_nan || largest == -INFINITY) return -1;
  const U16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const float inverse = float(std::min(1.0 / temperature, 1e30));  // finite: the largest logit's distance is 0
  const double scale = 1.0 / 4294967296.0;
  scores.resize(V + 4 * LANES);
  float best = -INFINITY;
  for (int64_t first = 0; first < V; first += 4 * LANES) {
    U16 words[4] = {lane + uint32_t(first / 4), U16{}, U16{} + position, U16{}};
    philox(words, seed);
    float* score = scores.data() + first;
    for (int j = 0; j < 4; j++) {
      // -log(u) with u = (word + 0.5) / 2^32; where u is near 1, by what is missing: log1p(-v) = log(1 - v) * v / (1 - (1 - v)).
      F16 u = (__builtin_convertvector(words[j], F16) + 0.5f) * float(scale);
      F16 v = (__builtin_convertvector(~words[j], F16) + 0.5f) * float(scale);
      F16 t = 1.0f - v, missing = 1.0f - t;
      F16 near_one = missing > 0.0f ? -log_of(t) * v / missing : v;
      F16 clock = v > 0.5f ? -log_of(u) : near_one;
      F16 minus_log = -log_of(clock);
      for (int i = 0; i < LANES; i++) score[4 * i + j] = minus_log[i];
    }
    int64_t n = std::min<int64_t>(4 * LANES, V - first);
#pragma omp simd reduction(max : best)
    for (int64_t i = 0; i < n; i++) {
      score[i] += (logits[first + i] - largest) * inverse;
      best = std::max(best, score[i]);
    }
  }
  int64_t winner = -1;
  double best_exact = -INFINITY;
  for (int64_t i = 0; i < V; i++) {
    if (!(scores[i] > best - 1e-3f)) continue;
    U16 words[4] = {U16{} + uint32_t(i / 4), U16{}, U16{} + position, U16{}};
    philox(words, seed);
    double clock = -std::log((double(words[i & 3][0]) + 0.5) * scale);
    double exact = (double(logits[i]) - double(largest)) / temperature - std::log(clock);
    if (exact > best_exact) best_exact = exact, winner = i;
  }
  return winner;
}

// logits [R, V] in float32. Returns the index of each row's largest, the first of equals; -1 where there is a NaN.
at::Tensor largest(const at::Tensor& logits) {
  int64_t R = logits.size(0), V = logits.size(1);
  TORCH_CHECK(logits.is_contiguous(), "logits must be contiguous");
  at::Tensor out = at::empty({R}, logits.options().dtype(at::kLong));
  const float* in = logits.data_ptr<float>();
  int64_t* token_ids = out.data_ptr<int64_t>();
  for_each_item(R, [&](int64_t r) {
    const float* row = in + r * V;
    bool has_nan;
    float most = largest_of(row, V, has_nan);
    token_ids[r] = has_nan ? -1 : first_of(row, V, most);
  });
  return out;
}

// logits [R, V] in float32; the others [R]. Returns token ids [R].
at::Tensor sample(
    const at::Tensor& logits, const at::Tensor& temperatures, const at::Tensor& seeds, const at::Tensor& positions) {
  int64_t R = logits.size(0), V = logits.size(1);
  TORCH_CHECK(logits.is_contiguous() && V < (int64_t(1) << 32), "logits [R, V], contiguous");
  at::Tensor out = at::empty({R}, seeds.options());
  const float* in = logits.data_ptr<float>();
  int64_t* token_ids = out.data_ptr<int64_t>();
  for_each_item(R, [&](int64_t r) {
    std::vector<float> scores;
    token_ids[r] = race(
        in + r * V, V, temperatures.data_ptr<double>()[r], uint64_t(seeds.data_ptr<int64_t>()[r]),
        uint32_t(positions.data_ptr<int64_t>()[r]), scores);
  });
  return out;
}

}  // namespace tandem
