// Weights as 4-bit integers with a scale and an offset for each output and group of inputs (engine/int4_weight.py), and
// their conversion to bfloat16: integer * scale + offset, rounded once to float32 and once to bfloat16.
//
// A panel (panels.h) consists of consecutive groups, so that it is read sequentially:
//
//   group    32 scales, 32 offsets, steps
//   step     16 pairs of inputs of 32 outputs, two pairs at a time
//   2 pairs  16 words of 8 integers: in word i, integer t is input i % 2 of pair t / 4, of output 8 * (t % 4) + i / 2
//
// So integer t of all words is one half of a vector of pairs, in the order that products use, and one shift extracts
// it.
#pragma once

#include <ATen/ops/zeros.h>

#include "huge_pages.h"
#include "vectors.h"

namespace tandem {

constexpr int64_t INT4_STEP_PAIRS = 16, INT4_OUTPUTS = 2 * LANES;
constexpr int64_t INT4_HEAD_BYTES = 2 * INT4_OUTPUTS * sizeof(float), INT4_PAIR_BYTES = INT4_OUTPUTS;
constexpr int64_t INT4_STEP_BYTES = INT4_STEP_PAIRS * INT4_PAIR_BYTES, WORDS_BYTES = 2 * INT4_PAIR_BYTES;

// Converts 16 pairs of inputs of a group's 32 outputs to bfloat16.
inline void widen_int4(const char* __restrict group, int64_t step, bf16* __restrict to) {
  const float *scale = reinterpret_cast<const float*>(group), *offset = scale + INT4_OUTPUTS;
  const char* from = group + INT4_HEAD_BYTES + step * INT4_STEP_BYTES;
#if defined(__AVX512BF16__)
  const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512 levels = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512 scales[4], offsets[4];
  for (int j = 0; j < 4; j++) {
    scales[j] = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(scale + 8 * j)));
    offsets[j] = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(offset + 8 * j)));
  }
  // A permutation uses only the lowest 4 bits of its indices: no mask or conversion is needed.
  const auto numbers = [&](__m512i words, int t) {
    return _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * t), levels), scales[t % 4], offsets[t % 4]);
  };
  for (int64_t i = 0; i < INT4_STEP_PAIRS / 2; i++, from += WORDS_BYTES) {
    const __m512i words = _mm512_loadu_si512(from);
    for (int t = 0; t < 8; t += 2, to += 32) store(to, _mm512_cvtne2ps_pbh(numbers(words, t + 1), numbers(words, t)));
  }
#else
  float scales[4][LANES], offsets[4][LANES];
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < LANES; i++) scales[j][i] = scale[8 * j + i / 2], offsets[j][i] = offset[8 * j + i / 2];
  for (int64_t i = 0; i < INT4_STEP_PAIRS / 2; i++, from += WORDS_BYTES)
    for (int t = 0; t < 8; t++)
      for (int part = 0; part < LANES; part += REGISTER, to += REGISTER) {
        Pairs words = load<Pairs>(from + part * sizeof(uint32_t));
        Sums integers = __builtin_convertvector((Ints)((words >> (4 * t)) & 15), Sums);
        store_bf16(to, integers * load<Sums>(scales[t % 4] + part) + load<Sums>(offsets[t % 4] + part));
      }
#endif
}

// packed [N, K / 2] bytes, scale and offset [N, groups] -> [N / 32, groups, bytes of a group]; the last panel is padded
// with zeros.
at::Tensor pack_int4(const at::Tensor& packed, const at::Tensor& scale, const at::Tensor& offset) {
  TORCH_CHECK(packed.dim() == 2 && packed.is_contiguous() && packed.scalar_type() == at::kByte, "packed [N, K / 2], bytes");
  for (const at::Tensor* each : {&scale, &offset})
    TORCH_CHECK(
        each->dim() == 2 && each->is_contiguous() && each->scalar_type() == at::kFloat && each->size(0) == packed.size(0) &&
            each->size(1) == scale.size(1),
        "scale and offset [N, groups], float32");
  const int64_t N = packed.size(0), pairs = packed.size(1), num_groups = scale.size(1);
  TORCH_CHECK(num_groups > 0 && pairs % (num_groups * INT4_STEP_PAIRS) == 0, "groups of a multiple of 32 inputs");
  const int64_t num_panels = (N + INT4_OUTPUTS - 1) / INT4_OUTPUTS, pairs_of_group = pairs / num_groups;
  const int64_t group_bytes = INT4_HEAD_BYTES + pairs_of_group * INT4_PAIR_BYTES;
  at::Tensor out = zeros_for_weights({num_panels, num_groups, group_bytes}, packed.options());
  const uint8_t* from = packed.data_ptr<uint8_t>();
  const float *scales = scale.data_ptr<float>(), *offsets = offset.data_ptr<float>();
  char* to = static_cast<char*>(out.data_ptr());
  for_each_range(num_panels * num_groups, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) {
      const int64_t first = item / num_groups * INT4_OUTPUTS, g = item % num_groups;
      float* head = reinterpret_cast<float*>(to + item * group_bytes);
      uint32_t* words = reinterpret_cast<uint32_t*>(head + 2 * INT4_OUTPUTS);
      for (int64_t n = 0; n < std::min(INT4_OUTPUTS, N - first); n++) {
        head[n] = scales[(first + n) * num_groups + g], head[INT4_OUTPUTS + n] = offsets[(first + n) * num_groups + g];
        const uint8_t* row = from + (first + n) * pairs + g * pairs_of_group;
        for (int64_t k = 0; k < pairs_of_group; k++) {
          const int t = int(4 * (k % 2) + n / 8);
          uint32_t* word = words + k / 2 * LANES + n % 8 * 2;
          word[0] |= uint32_t(row[k] & 15) << (4 * t), word[1] |= uint32_t(row[k] >> 4) << (4 * t);
        }
      }
    }
  });
  return out;
}

}  // namespace tandem
