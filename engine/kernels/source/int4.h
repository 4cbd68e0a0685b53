// Weights as 4-bit integers with a scale and an offset for each output and group of inputs (engine/int4_weight.py).
//
// A panel (panels.h) consists of consecutive groups, so that it is read sequentially:
//
//   group    32 scales, 32 offsets, of the tensor's dtype; steps
//   step     16 pairs of inputs of 32 outputs, two pairs at a time
//   2 pairs  32 words of 4 integers: in word i, integer t is input i % 2 of pair t / 2, of output 16 * (t % 2) + i / 2
//
// So integer t of all words is one vector of pairs, in the order that products use, and one shift extracts it.
#pragma once

#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include "huge_pages.h"
#include "vectors.h"

namespace tandem {

constexpr int64_t INT4_STEP_PAIRS = 16, INT4_OUTPUTS = 2 * LANES;
constexpr int64_t INT4_PAIR_BYTES = INT4_OUTPUTS, WORDS_BYTES = 2 * INT4_PAIR_BYTES;
constexpr int64_t INT4_STEP_BYTES = INT4_STEP_PAIRS * INT4_PAIR_BYTES;

// How a weight's scales and offsets are stored: in 16 bits if these can represent all of them.
enum class Int4Head { BFLOAT16, FLOAT16, FLOAT32 };

inline Int4Head int4_head(const at::Tensor& panels) {
  const auto type = panels.scalar_type();
  return type == at::kBFloat16 ? Int4Head::BFLOAT16 : type == at::kHalf ? Int4Head::FLOAT16 : Int4Head::FLOAT32;
}

inline int64_t int4_head_bytes(Int4Head head) { return 2 * INT4_OUTPUTS * (head == Int4Head::FLOAT32 ? 4 : 2); }

// A register of a group's scales, or of its offsets, from `numbers` on.
inline Sums int4_numbers(const char* numbers, Int4Head head, int part) {
  if (head == Int4Head::BFLOAT16) return to_sums(reinterpret_cast<const bf16*>(numbers) + part * REGISTER);
  if (head == Int4Head::FLOAT16) return half_to_sums(numbers + part * REGISTER * 2);
  return load<Sums>(numbers + part * REGISTER * 4);
}

// Integers from 0 to 15 as bfloat16, twice: a permutation uses the lowest 5 bits of its indices.
alignas(64) constexpr bf16 INT4_NUMBERS[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

// Integer t of each word, as bfloat16, which is exact.
inline Pairs int4_extracted(Pairs words, int t) {
#if defined(__AVX512BW__)
  return (Pairs)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)words, 4 * t), _mm512_load_si512(INT4_NUMBERS));
#else
  const Pairs low = words >> (4 * t) & 15, high = words >> (4 * t + 16) & 15;
  return (Pairs)__builtin_convertvector((Ints)low, Sums) >> 16 | (Pairs)__builtin_convertvector((Ints)high, Sums);
#endif
}

// Pair 0 or 1 of two pairs of inputs of 32 outputs.
inline void int4_pair(const char* words, int pair, Pairs (&integers)[2 * PARTS]) {
#pragma GCC unroll 8
  for (int i = 0; i < 2 * PARTS; i++)
    integers[i] = int4_extracted(load<Pairs>(words + i % PARTS * sizeof(Pairs)), 2 * pair + i / PARTS);
}

// The 16 pairs of a group's step as the numbers that they stand for: integer * scale + offset, rounded once to float32
// and once to bfloat16.
inline void widen_int4(const char* __restrict group, Int4Head head, int64_t step, uint32_t* __restrict to) {
  const int64_t head_bytes = int4_head_bytes(head);
  Sums scale[2 * PARTS], offset[2 * PARTS];
  for (int i = 0; i < 2 * PARTS; i++)
    scale[i] = int4_numbers(group, head, i), offset[i] = int4_numbers(group + head_bytes / 2, head, i);
  const char* words = group + head_bytes + step * INT4_STEP_BYTES;
  for (int64_t k = 0; k < INT4_STEP_PAIRS; k++, to += INT4_OUTPUTS) {
    Pairs integers[2 * PARTS];
    int4_pair(words + k / 2 * WORDS_BYTES, k % 2, integers);
    for (int i = 0; i < 2 * PARTS; i++) {
      const Sums low = (Sums)(integers[i] << 16) * scale[i] + offset[i];
      const Sums high = (Sums)(integers[i] & 0xffff0000u) * scale[i] + offset[i];
      store(to + i * REGISTER, rounded_pairs(low, high));
    }
  }
}

// The narrowest form that represents all numbers exactly.
inline at::ScalarType int4_head_type(const at::Tensor& scale, const at::Tensor& offset) {
  for (const auto type : {at::kBFloat16, at::kHalf})
    if (scale.equal(scale.to(type).to(at::kFloat)) && offset.equal(offset.to(type).to(at::kFloat))) return type;
  return at::kFloat;
}

// packed [N, K / 2] bytes, scale and offset [N, groups] -> [N / 32, groups, numbers that a group takes the room of], of
// the scales' dtype; the last panel is padded with zeros.
at::Tensor pack_int4(const at::Tensor& packed, const at::Tensor& scale, const at::Tensor& offset) {
  TORCH_CHECK(packed.dim() == 2 && packed.is_contiguous() && packed.scalar_type() == at::kByte, "packed [N, K / 2], bytes");
  for (const at::Tensor* each : {&scale, &offset})
    TORCH_CHECK(
        each->dim() == 2 && each->is_contiguous() && each->scalar_type() == at::kFloat && each->size(0) == packed.size(0) &&
            each->size(1) == scale.size(1),
        "scale and offset [N, groups], float32");
  const int64_t N = packed.size(0), pairs = packed.size(1), num_groups = scale.size(1);
  TORCH_CHECK(num_groups > 0 && pairs % (num_groups * INT4_STEP_PAIRS) == 0, "groups of a multiple of 32 inputs");
  const at::ScalarType type = int4_head_type(scale, offset);
  const at::Tensor scales = scale.to(type), offsets = offset.to(type);
  const int64_t bytes = scales.element_size(), half_head = INT4_OUTPUTS * bytes;
  const int64_t num_panels = (N + INT4_OUTPUTS - 1) / INT4_OUTPUTS, pairs_of_group = pairs / num_groups;
  const int64_t group_bytes = 2 * half_head + pairs_of_group * INT4_PAIR_BYTES;
  at::Tensor out = zeros_for_weights({num_panels, num_groups, group_bytes / bytes}, scales.options());
  const uint8_t* from = packed.data_ptr<uint8_t>();
  const char *scale_bytes = static_cast<const char*>(scales.data_ptr()), *offset_bytes = static_cast<const char*>(offsets.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  for_each_range(num_panels * num_groups, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) {
      const int64_t first = item / num_groups * INT4_OUTPUTS, g = item % num_groups;
      char* group = to + item * group_bytes;
      uint16_t* words = reinterpret_cast<uint16_t*>(group + 2 * half_head);
      for (int64_t n = 0; n < std::min(INT4_OUTPUTS, N - first); n++) {
        const int64_t at = ((first + n) * num_groups + g) * bytes;
        std::memcpy(group + n * bytes, scale_bytes + at, bytes);
        std::memcpy(group + half_head + n * bytes, offset_bytes + at, bytes);
        const uint8_t* row = from + (first + n) * pairs + g * pairs_of_group;
        for (int64_t k = 0; k < pairs_of_group; k++) {
          const int t = int(2 * (k % 2) + n / LANES);
          uint16_t* word = words + k / 2 * INT4_OUTPUTS + n % LANES * 2;
          word[0] |= uint16_t((row[k] & 15) << (4 * t)), word[1] |= uint16_t((row[k] >> 4) << (4 * t));
        }
      }
    }
  });
  return out;
}

}  // namespace tandem
