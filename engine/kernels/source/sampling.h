// Chooses the next token: the largest logit, or a draw (defined in engine/sampling/sampler.py).
#pragma once

#include <ATen/ops/empty.h>

#include <vector>

#include "filters.h"
#include "vectors.h"

namespace tandem {

typedef uint64_t W16 __attribute__((vector_size(128)));

// The lower and upper halves of 16 products of 64 bits. (For converted vectors, compilers would multiply all 64 bits.)
inline void multiply(U16 x, uint32_t factor, U16& low, U16& high) {
#if defined(__AVX512F__)
  const __m512i factors = _mm512_set1_epi32(int(factor));
  __m512i even = _mm512_mul_epu32((__m512i)x, factors), odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), factors);
  low = (U16)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  high = (U16)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#else
  W16 product = __builtin_convertvector(x, W16) * uint64_t(factor);
  low = __builtin_convertvector(product, U16);
  high = __builtin_convertvector(product >> 32, U16);
#endif
}

// Philox4x32-10 (engine/sampling/random.py) of 16 counters (block.., 0, position, 0): word j of lane i belongs to token
// 4 * (block + i) + j.
inline void philox(U16 c[4], uint64_t seed) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    U16 low0, high0, low1, high1;
    multiply(c[0], 0xD2511F53, low0, high0);
    multiply(c[2], 0xCD9E8D57, low1, high1);
    c[0] = high1 ^ c[1] ^ k0;
    c[1] = low1;
    c[2] = high0 ^ c[3] ^ k1;
    c[3] = low0;
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
}

// log(x) of a normal positive x, with an error of about 1e-6 of itself or of 1: the exponent, plus the atanh series of
// the mantissa around 1.
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

// The largest of n numbers; -infinity for n = 0. Written out because compilers do not vectorize a loop over `std::max`.
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
  for (int j = 1; j < N; j++) most[0] = most[j] > most[0] ? most[j] : most[0];
  float largest = -INFINITY;
  for (int lane = 0; lane < REGISTER; lane++) largest = std::max(largest, most[0][lane]);
  for (; i < n; i++) {
    has_nan |= x[i] != x[i];
    largest = std::max(largest, x[i]);
  }
  return largest;
}

// The first position of `value`, which must occur.
inline int64_t first_of(const float* x, int64_t n, float value) {
  int64_t i = 0;
  for (; i + AT_ONCE <= n; i += AT_ONCE) {
    Ints hits{};
    for (int j = 0; j < AT_ONCE; j += REGISTER) hits |= load<Sums>(x + i + j) == value;
    if (any(hits)) break;
  }
  return std::find(x + i, x + n, value) - x;
}

constexpr float LONGEST = 24.0f;  // an upper bound of -log(clock): u is at most 1 - 2^-33
constexpr float SLACK = 0.01f;  // above the error of float32 scores, and how far below the best a candidate may be

// -log(clock) of 64 tokens, from their random words: clock = -log(u) with u = (word + 0.5) / 2^32.
inline void minus_log_clocks(const U16 words[4], float* out) {
  const float scale = float(1.0 / 4294967296.0);
  for (int j = 0; j < 4; j++) {
    // For u near 1, computed from v = 1 - u: log1p(-v) = log(1 - v) * v / (1 - (1 - v)).
    F16 u = (__builtin_convertvector(words[j], F16) + 0.5f) * scale;
    F16 v = (__builtin_convertvector(~words[j], F16) + 0.5f) * scale;
    F16 t = 1.0f - v, missing = 1.0f - t;
    F16 near_one = missing > 0.0f ? -log_of(t) * v / missing : v;
    F16 clock = v > 0.5f ? -log_of(u) : near_one;
    F16 minus_log = -log_of(clock);
    for (int i = 0; i < LANES; i++) out[4 * i + j] = minus_log[i];
  }
}

// Whether -log(clock) of any of these tokens may reach `needed`, which is above SLACK. Compares words with a bound:
// since -log(u) is at least 1 - u, 1 - u would have to be at most exp(-needed).
inline bool any_reaches(const U16 words[4], float needed) {
  const uint32_t bound = uint32_t(std::exp(-double(needed)) * 4294967296.0) + 1;
  U16 hits{};
  for (int j = 0; j < 4; j++) hits |= (U16)(~words[j] < bound);
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits |= hits[i];
  return bits != 0;
}

// Draws one token of a row: engine/sampling/sampler.py, step 10. Computes float32 scores only for groups of 64 tokens
// of which one may win, and float64 scores only for tokens close to the best. Begins with the group of the largest
// logit. A token far below it would need a random word that is very rare, so most groups need no logarithm. The logits
// must not include NaN, and the largest must be finite.
int64_t race(const float* logits, int64_t V, float largest, double temperature, uint64_t seed, uint32_t position) {
  const U16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const float inverse = float(std::min(1.0 / temperature, 1e30));  // finite, since the largest logit's distance is 0
  struct Candidate {
    int64_t token;
    float score;
  };
  std::vector<Candidate> candidates;
  float best = -INFINITY;
  auto look_at = [&](int64_t first) {
    const int64_t n = std::min<int64_t>(AT_ONCE, V - first);
    bool is_nan;
    const float needed = best - (largest_of(logits + first, n, is_nan) - largest) * inverse - SLACK;
    if (needed > LONGEST) return;
    U16 words[4] = {lane + uint32_t(first / 4), U16{}, U16{} + position, U16{}};
    philox(words, seed);
    if (needed > SLACK && !any_reaches(words, needed)) return;
    alignas(64) float scores[AT_ONCE];
    minus_log_clocks(words, scores);
    for (int64_t i = 0; i < n; i++) {
      const float score = scores[i] + (logits[first + i] - largest) * inverse;
      best = std::max(best, score);
      if (score > best - SLACK) candidates.push_back({first + i, score});
    }
  };
  const int64_t start = first_of(logits, V, largest) / AT_ONCE * AT_ONCE;
  look_at(start);
  for (int64_t first = 0; first < V; first += AT_ONCE) {
    if (first != start) look_at(first);
  }
  int64_t winner = -1;
  double best_exact = -INFINITY;
  for (const Candidate& each : candidates) {
    if (!(each.score > best - 1e-3f)) continue;
    U16 words[4] = {U16{} + uint32_t(each.token / 4), U16{}, U16{} + position, U16{}};
    philox(words, seed);
    double clock = -std::log((double(words[each.token & 3][0]) + 0.5) / 4294967296.0);
    double exact = (double(logits[each.token]) - double(largest)) / temperature - std::log(clock);
    if (exact > best_exact || (exact == best_exact && each.token < winner)) best_exact = exact, winner = each.token;
  }
  return winner;
}

// logits [R, V] in float32. Returns the index of each row's largest logit, the first of equal ones; -1 if the row has a
// NaN or only -infinity.
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
    token_ids[r] = has_nan || most == -INFINITY ? -1 : first_of(row, V, most);
  });
  return out;
}

// logits [R, V] in float32; rows with filters are overwritten. integers [R, 3]: seed, position, top_k; numbers [R, 3]
// in float64: temperature, top_p, min_p. Returns token ids [R]; -1 for a row with a NaN or an infinite maximum.
at::Tensor sample(const at::Tensor& logits, const at::Tensor& integers, const at::Tensor& numbers) {
  int64_t R = logits.size(0), V = logits.size(1);
  TORCH_CHECK(logits.is_contiguous() && V < (int64_t(1) << 32), "logits [R, V], contiguous");
  TORCH_CHECK(integers.is_contiguous() && integers.numel() == 3 * R, "integers [R, 3], contiguous");
  TORCH_CHECK(numbers.is_contiguous() && numbers.numel() == 3 * R, "numbers [R, 3], contiguous");
  at::Tensor out = at::empty({R}, integers.options());
  float* in = logits.data_ptr<float>();
  const int64_t* of_row = integers.data_ptr<int64_t>();
  const double* number_of_row = numbers.data_ptr<double>();
  int64_t* token_ids = out.data_ptr<int64_t>();
  for_each_item(R, [&](int64_t r) {
    float* row = in + r * V;
    const int64_t seed = of_row[3 * r], position = of_row[3 * r + 1];
    const double temperature = number_of_row[3 * r];
    const Filters filters{of_row[3 * r + 2], number_of_row[3 * r + 1], number_of_row[3 * r + 2]};
    bool has_nan;
    const float largest = largest_of(row, V, has_nan);
    if (has_nan || std::isinf(largest)) {
      token_ids[r] = -1;
      return;
    }
    FilteredRow(row, V, largest, temperature).apply(filters);
    token_ids[r] = race(row, V, largest, temperature, uint64_t(seed), uint32_t(position));
  });
  return out;
}

}  // namespace tandem
