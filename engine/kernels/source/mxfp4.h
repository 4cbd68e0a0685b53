// Weights in MXFP4 (engine/model_loader/mxfp4.py says what that is), and their conversion to bfloat16, which is exact: a
// number of 4 bits becomes a bfloat16 by a table, to whose exponent its group's power is added.
//
// A panel (panels.h) consists of consecutive groups of 32 inputs, 17 rows of 32 bytes each:
//
//   row 0      the exponents of 32 outputs
//   2 rows     2 pairs of inputs: 32 words of 4 numbers; in word i, number t is input i % 2 of pair t / 2, of output
//              16 * (t % 2) + i / 2
//
// So number t of all words is one vector of pairs, in the order that products use, and one shift extracts it.
#pragma once

#include "huge_pages.h"
#include "vectors.h"

namespace tandem {

constexpr int64_t MXFP4_OUTPUTS = 2 * LANES, MXFP4_PAIRS = 16, MXFP4_ROWS = 1 + MXFP4_PAIRS;
constexpr int64_t MXFP4_GROUP_BYTES = MXFP4_ROWS * MXFP4_OUTPUTS;
constexpr int MXFP4_BIAS = 127;
// Exponents, with their bias, with which 0.5 is not too small for a bfloat16, and 6 not too large.
constexpr int MXFP4_LEAST = 2, MXFP4_MOST = 252;

// The numbers of 4 bits, twice: a permutation uses the lowest 5 bits of its indices.
alignas(64) constexpr bf16 MXFP4_NUMBERS[32] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

// Converts a group's 16 pairs of inputs of 32 outputs to bfloat16.
inline void widen_mxfp4(const char* __restrict group, bf16* __restrict to) {
  const auto* exponents = reinterpret_cast<const uint8_t*>(group);
  const char* from = group + MXFP4_OUTPUTS;
#if defined(__AVX512BF16__)
  const __m512i numbers = _mm512_load_si512(MXFP4_NUMBERS), magnitude = _mm512_set1_epi16(7);
  __m512i powers[2];  // of both inputs of 16 outputs, as they are added to the exponent of a bfloat16
  for (int half = 0; half < 2; half++) {
    const __m512i each = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents) + half));
    const __m512i twice = _mm512_or_si512(each, _mm512_slli_epi32(each, 16));
    powers[half] = _mm512_slli_epi16(_mm512_sub_epi16(twice, _mm512_set1_epi16(MXFP4_BIAS)), 7);
  }
  for (int64_t i = 0; i < MXFP4_PAIRS / 2; i++, from += 64) {
    const __m512i words = _mm512_loadu_si512(from);
    for (int t = 0; t < 4; t++, to += 32) {
      const __m512i codes = _mm512_srli_epi16(words, 4 * t);
      const __m512i found = _mm512_permutexvar_epi16(codes, numbers);
      const __mmask32 is_not_zero = _mm512_test_epi16_mask(codes, magnitude);
      _mm512_storeu_si512(to, _mm512_mask_add_epi16(found, is_not_zero, found, powers[t % 2]));
    }
  }
#else
  for (int64_t i = 0; i < MXFP4_PAIRS / 2; i++, from += 64)
    for (int t = 0; t < 4; t++, to += 32)
      for (int64_t n = 0; n < 32; n++) {
        uint16_t word;
        std::memcpy(&word, from + 2 * n, 2);
        const bf16 found = MXFP4_NUMBERS[word >> (4 * t) & 15];
        const int power = (exponents[t % 2 * LANES + n / 2] - MXFP4_BIAS) * 128;
        to[n] = found & 0x7fff ? bf16(found + power) : found;
      }
#endif
}

// pairs [N, K / 2] bytes, the lower half first; exponents [N, K / 32] bytes -> [N / 32, K / 32, 17, 32]; the last panel
// is padded with zeros. Numbers below 2^-124, which only exponents below 2 have, become zeros.
at::Tensor pack_mxfp4(const at::Tensor& pairs, const at::Tensor& exponents) {
  for (const at::Tensor* each : {&pairs, &exponents})
    TORCH_CHECK(each->dim() == 2 && each->is_contiguous() && each->scalar_type() == at::kByte, "pairs and exponents [N, ..], bytes");
  const int64_t N = pairs.size(0), num_groups = exponents.size(1), row_pairs = pairs.size(1);
  TORCH_CHECK(exponents.size(0) == N && row_pairs == num_groups * MXFP4_PAIRS, "an exponent for each 32 inputs");
  const int64_t num_panels = (N + MXFP4_OUTPUTS - 1) / MXFP4_OUTPUTS;
  at::Tensor out = zeros_for_weights({num_panels, num_groups, MXFP4_ROWS, MXFP4_OUTPUTS}, pairs.options());
  const uint8_t *from = pairs.data_ptr<uint8_t>(), *powers = exponents.data_ptr<uint8_t>();
  uint8_t* to = out.data_ptr<uint8_t>();
  for_each_range(num_panels * num_groups, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) {
      const int64_t first = item / num_groups * MXFP4_OUTPUTS, g = item % num_groups;
      uint8_t* group = to + item * MXFP4_GROUP_BYTES;
      uint16_t* words = reinterpret_cast<uint16_t*>(group + MXFP4_OUTPUTS);
      std::memset(group, MXFP4_BIAS, MXFP4_OUTPUTS);
      for (int64_t n = 0; n < std::min(MXFP4_OUTPUTS, N - first); n++) {
        const uint8_t power = powers[(first + n) * num_groups + g];
        TORCH_CHECK(power <= MXFP4_MOST, "an exponent must be at most 125");
        if (power < MXFP4_LEAST) continue;
        group[n] = power;
        const uint8_t* row = from + (first + n) * row_pairs + g * MXFP4_PAIRS;
        for (int64_t k = 0; k < MXFP4_PAIRS; k++) {
          const int t = int(2 * (k % 2) + n / LANES);
          uint16_t* word = words + k / 2 * 32 + n % LANES * 2;
          word[0] |= uint16_t((row[k] & 15) << (4 * t)), word[1] |= uint16_t((row[k] >> 4) << (4 * t));
        }
      }
    }
  });
  return out;
}

}  // namespace tandem
