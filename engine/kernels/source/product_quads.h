// x @ weight.T with weights in int4 or int8, where instructions multiply bytes but no pairs of bfloat16 (AVX2): inputs are
// rounded to 8 bits, too, with a scale for every 32 of them. Four inputs of an output share 32 bits, a quad.
//
//   sum over 32 inputs each of (scale of x * (sum of integers * integers, exact) [* the group's scale])
//
// Computing bfloat16 weights first took all the time: two to four times as long, also with one row. With AVX-512 the
// products of pairs are used, which do not round inputs: what quads would take there has not been measured.
#pragma once

#include <vector>

#include "panels.h"
#include "product_groups.h"
#include "read_ahead.h"
#include "row_blocks.h"
#include "vectors.h"

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define TANDEM_QUADS 1
#else
#define TANDEM_QUADS 0
#endif

#if TANDEM_QUADS

namespace tandem {

constexpr int64_t QUAD = 4, SCALED = 32;           // inputs of a quad, and those that share a scale
constexpr int64_t QUADS_OF_SCALE = SCALED / QUAD;  // so many sums of two products of 15 * 127 each fit into 16 bits
constexpr float TINY = 1e-30f;                     // inputs below this are taken for zeros: 127 / x must be finite
constexpr float MOST = 127;

inline bool takes_quads(const Panels& weight) { return weight.form == Form::INT4 || weight.form == Form::INT8; }

// Rows of inputs in 8 bits, each padded with zeros to whole scales.
struct QuadRows {
  int64_t num_scales, num_groups;
  std::vector<int8_t> numbers;  // [T, scales * 32]
  std::vector<float> scales;    // [T, scales]
  std::vector<float> sums;      // [T, groups] of int4: of each group's inputs, as they were rounded

  QuadRows(const bf16* x, int64_t T, const Panels& weight)
      : num_scales((2 * weight.pairs + SCALED - 1) / SCALED), num_groups(weight.form == Form::INT4 ? weight.pairs / weight.pairs_of_group() : 0),
        numbers(T * num_scales * SCALED), scales(T * num_scales), sums(T * num_groups) {
    const int64_t num_inputs = 2 * weight.pairs;
    at::parallel_for(0, T, 16, [&](int64_t begin, int64_t end) {  // within another parallel region: by one thread
      for (int64_t t = begin; t < end; t++)
        for (int64_t s = 0; s < num_scales; s++) {
          bf16 padded[SCALED] = {};
          const int64_t count = std::min(SCALED, num_inputs - s * SCALED);
          std::memcpy(padded, x + t * num_inputs + s * SCALED, count * sizeof(bf16));
          int8_t* to = numbers.data() + (t * num_scales + s) * SCALED;
          const float scale = scales[t * num_scales + s] = round_to_bytes(padded, num_groups != 0, to);
          if (num_groups) sums[t * num_groups + s * num_groups / num_scales] += float(sum_of(to)) * scale;
        }
    });
  }

  const int8_t* row(int64_t t) const { return numbers.data() + t * num_scales * SCALED; }

 private:
  static int32_t sum_of(const int8_t* bytes) {
    int32_t sum = 0;
    for (int64_t i = 0; i < SCALED; i++) sum += bytes[i];
    return sum;
  }

  // in_turn: a quad holds inputs 0, 2, 1, 3, as the bytes of two pairs of int4 do (int4.h).
  // Returns the scale, which is no number if an input is not.
  static float round_to_bytes(const bf16* x, bool in_turn, int8_t* to) {
    uint16_t most_bits = 0;
    for (int64_t i = 0; i < SCALED; i++) most_bits = std::max<uint16_t>(most_bits, x[i] & 0x7fff);  // NaN has most
    const float most = to_float(most_bits);
    if (most < TINY) return 0;
    const __m256 by = _mm256_set1_ps(MOST / most);
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i parts[4];
    for (int i = 0; i < 4; i++) parts[i] = _mm256_cvtps_epi32(_mm256_mul_ps((__m256)to_sums(x + i * REGISTER), by));
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(parts[0], parts[1]), _mm256_packs_epi32(parts[2], parts[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, in_order);
    if (in_turn) {
      const __m128i middle = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
      bytes = _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(middle));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
    return most / MOST;
  }
};

inline __m256i quad_of(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, QUAD);
  return _mm256_set1_epi32(four);
}

// Sums of R rows and a panel of int4, without offsets: [R, 32].
template <int R>
void multiply_int4_quads(const QuadRows& x, int64_t from, const GroupsOfPanel& panel, EvenlyAhead ahead, float* totals) {
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  std::fill_n(totals, R * PANEL, 0.0f);
  const int8_t* quads = x.row(from);
  const int64_t row_bytes = x.num_scales * SCALED;
  int64_t s = 0;
  for (int64_t g = 0; g < panel.num_groups; g++) {
    const char* words = panel.words(g);
    for (int64_t step = 0; step < panel.steps_of_group; step++, s++) {
      __m256i acc[R][4] = {};
#pragma GCC unroll 8
      for (int64_t k = 0; k < QUADS_OF_SCALE; k++, words += WORDS_BYTES, quads += QUAD) {
        ahead.next();
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {  // 8 outputs, and those 16 further on: all at once would not fit into registers
          const __m256i both = load<__m256i>(words + half * sizeof(__m256i));
          const __m256i low = _mm256_and_si256(both, nibble), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
#pragma GCC unroll 3
          for (int r = 0; r < R; r++) {
            const __m256i quad = quad_of(quads + r * row_bytes);
            acc[r][half] = _mm256_add_epi16(acc[r][half], _mm256_maddubs_epi16(low, quad));
            acc[r][2 + half] = _mm256_add_epi16(acc[r][2 + half], _mm256_maddubs_epi16(high, quad));
          }
        }
      }
      for (int i = 0; i < 4; i++) {
        const __m256 scale = (__m256)panel.scale(0, g, i);
        for (int r = 0; r < R; r++) {
          float* total = totals + r * PANEL + i * REGISTER;
          const __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(x.scales[(from + r) * x.num_scales + s]));
          const __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(acc[r][i], ones));
          _mm256_storeu_ps(total, _mm256_fmadd_ps(sum, by, _mm256_loadu_ps(total)));
        }
      }
    }
  }
}

// Adds the offsets, each times the sum of its group's inputs.
template <int R>
void add_offsets(const float* x_sums, const GroupsOfPanel& panel, float* totals) {
  for (int i = 0; i < 4; i++)
    for (int r = 0; r < R; r++) {
      float* to = totals + r * PANEL + i * REGISTER;
      __m256 total = _mm256_loadu_ps(to);
      for (int64_t g = 0; g < panel.num_groups; g++)
        total = _mm256_fmadd_ps((__m256)panel.offset(0, g, i), _mm256_set1_ps(x_sums[r * panel.num_groups + g]), total);
      _mm256_storeu_ps(to, total);
    }
}

// Sums of R rows and a panel of int8: [R, 32]. A quad of weights is two pairs of inputs, put side by side.
template <int R>
void multiply_int8_quads(const QuadRows& x, int64_t from, const int8_t* panel, int64_t pairs, EvenlyAhead ahead, float* totals) {
  constexpr int64_t PAIR_BYTES = 2 * PANEL;
  const __m256i ones = _mm256_set1_epi16(1);
  // Of outputs 0 to 3 and 8 to 11, 4 to 7 and 12 to 15, and the same of the second 16.
  __m256 sums[R][4] = {};
  const int8_t* quads = x.row(from);
  const int64_t row_bytes = x.num_scales * SCALED;
  for (int64_t s = 0; s < x.num_scales; s++) {
    __m256i acc[R][4] = {};
    const int64_t end = std::min(pairs, (s + 1) * SCALED / 2);
    for (int64_t k = s * SCALED / 2; k < end; k += 2, quads += QUAD) {
      ahead.next();
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const int8_t* at = panel + k * PAIR_BYTES + half * int64_t(sizeof(__m256i));
        const __m256i first = load<__m256i>(at), second = k + 1 < pairs ? load<__m256i>(at + PAIR_BYTES) : __m256i{};
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
          const __m256i weights = j ? _mm256_unpackhi_epi16(first, second) : _mm256_unpacklo_epi16(first, second);
          const __m256i sizes = _mm256_abs_epi8(weights);
#pragma GCC unroll 3
          for (int r = 0; r < R; r++) {
            const __m256i quad = _mm256_sign_epi8(quad_of(quads + r * row_bytes), weights);
            __m256i& to = acc[r][2 * half + j];
            to = _mm256_add_epi32(to, _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, quad), ones));
          }
        }
      }
    }
    for (int r = 0; r < R; r++) {
      const __m256 scale = _mm256_set1_ps(x.scales[(from + r) * x.num_scales + s]);
      for (int i = 0; i < 4; i++) sums[r][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][i]), scale, sums[r][i]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 4; i += 2) {
      _mm256_storeu_ps(totals + r * PANEL + i * REGISTER, _mm256_permute2f128_ps(sums[r][i], sums[r][i + 1], 0x20));
      _mm256_storeu_ps(totals + r * PANEL + (i + 1) * REGISTER, _mm256_permute2f128_ps(sums[r][i], sums[r][i + 1], 0x31));
    }
}

// One thread's share of a product of T rows: see multiply_pairs_share.
template <class Finish>
void multiply_quads_share(
    const QuadRows& rows, int64_t T, const Panels& weight, int64_t begin, int64_t end, const char* after, const Finish& finish) {
  const int64_t pairs = weight.pairs, row_blocks = row_blocks_of(T), num_groups = rows.num_groups;
  for (int64_t item = begin; item < end; item++) {
    const int64_t p = item / row_blocks, first = item % row_blocks * ROWS_OF_ITEM, num_rows = std::min(ROWS_OF_ITEM, T - first);
    const int64_t num_tiles = (num_rows + MATMUL_ROWS - 1) / MATMUL_ROWS, bytes = (weight.panel_bytes() + num_tiles - 1) / num_tiles;
    const bool is_next_ours = (item + 1) / row_blocks != p && item + 1 < end;
    const char* next = is_next_ours ? weight.at(p + 1, 0) : item + 1 == end ? after : nullptr;
    for (int64_t i = 0; i < num_tiles; i++) {
      const int64_t from = first + num_rows * i / num_tiles, to = first + num_rows * (i + 1) / num_tiles;
      const EvenlyAhead ahead(next ? next + i * bytes : nullptr, next ? bytes : 0, pairs);
      with_rows<1, MATMUL_ROWS>(to - from, [&](auto R) {
        F16 sums[R()][2];
        float* totals = reinterpret_cast<float*>(sums);
        if (weight.form == Form::INT4) {
          const GroupsOfPanel groups(weight, p);
          multiply_int4_quads<R()>(rows, from, groups, ahead, totals);
          add_offsets<R()>(rows.sums.data() + from * num_groups, groups, totals);
        } else {
          multiply_int8_quads<R()>(rows, from, reinterpret_cast<const int8_t*>(weight.at(p, 0)), pairs, ahead, totals);
        }
        for (int r = 0; r < R(); r++) finish(from + r, p, sums[r]);
      });
    }
  }
}

}  // namespace tandem

#endif
