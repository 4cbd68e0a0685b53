// Vectors of 16 floats and of 16 pairs of bfloat16, and the arithmetic that the kernels need. These are vector types of
// the compiler: GCC and Clang lower 64-byte vectors to the instructions of the machine. Only the dot product of
// bfloat16 pairs uses an instruction explicitly, if there is one (AVX512-BF16).
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace tandem {

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t bf16;

constexpr int LANES = 16;
constexpr float LOG2_E = 1.44269504f;

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline bf16 to_bf16(float f) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

// Types for hot loops, with one register of sums, pairs or integers. GCC keeps variables wider than a register in
// memory, and copies them back and forth around each operation.
#if defined(__AVX512F__)
constexpr int REGISTER = 16;
#elif defined(__AVX__)
constexpr int REGISTER = 8;
#else
constexpr int REGISTER = 4;
#endif
constexpr int PARTS = LANES / REGISTER;  // registers that hold 16 sums
typedef float Sums __attribute__((vector_size(REGISTER * sizeof(float))));
typedef uint32_t Pairs __attribute__((vector_size(REGISTER * sizeof(uint32_t))));
typedef int32_t Ints __attribute__((vector_size(REGISTER * sizeof(int32_t))));

inline Sums broadcast(float x) { return x - Sums{}; }

// Converts 16 numbers from and to bfloat16 in memory.
inline F16 to_float(const bf16* p) {
  typedef uint16_t H16 __attribute__((vector_size(32)));
  return (F16)(__builtin_convertvector(load<H16>(p), U16) << 16);
}

inline void store_bf16(bf16* to, Sums v) {
#if defined(__AVX512BF16__)
  store(to, _mm512_cvtneps_pbh((__m512)v));
#else
  typedef uint16_t Halves __attribute__((vector_size(REGISTER * sizeof(uint16_t))));
  Pairs bits = (Pairs)v;
  store(to, __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves));
#endif
}

#if !defined(__AVX512F__)
inline void store_bf16(bf16* to, const F16& v) {
  for (int i = 0; i < PARTS; i++) store_bf16(to + i * REGISTER, load<Sums>(reinterpret_cast<const float*>(&v) + i * REGISTER));
}
#endif

// Converts 64 integers of 8 bits to bfloat16. This is exact: the bfloat16 is the upper half of the integer as a float.
inline void widen(const int8_t* __restrict from, bf16* __restrict to) {
#if defined(__AVX512BF16__)
  for (int i = 0; i < 64; i += 32) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + 16))));
    store(to + i, _mm512_cvtne2ps_pbh(high, low));
  }
#else
  for (int i = 0; i < 64; i++) {
    float f = from[i];
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    to[i] = bf16(bits >> 16);
  }
#endif
}

// Converts a register of numbers.
inline Sums to_sums(const bf16* p) {
  typedef uint16_t Halves __attribute__((vector_size(REGISTER * sizeof(uint16_t))));
  return (Sums)(__builtin_convertvector(load<Halves>(p), Pairs) << 16);
}

// The same for a register of float16.
inline Sums half_to_sums(const void* p) {
#if defined(__AVX512F__)
  return (Sums)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__F16C__)
  return (Sums)_mm256_cvtph_ps(load<__m128i>(p));
#else
  at::Half numbers[REGISTER];
  std::memcpy(numbers, p, sizeof(numbers));
  Sums sums;
  for (int i = 0; i < REGISTER; i++) sums[i] = float(numbers[i]);
  return sums;
#endif
}

inline Sums rounded(Sums v) {
#if defined(__AVX512BF16__)
  bf16 half[REGISTER];
  store_bf16(half, v);
  return to_float(half);
#else
  Pairs bits = (Pairs)v;
  return (Sums)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
#endif
}

// Pairs of bfloat16: the rounded numbers of `low` and `high`.
inline Pairs rounded_pairs(Sums low, Sums high) {
#if defined(__AVX512BF16__)
  const __m512i in_turn = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Pairs)_mm512_permutexvar_epi16(in_turn, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
  return (Pairs)rounded(low) >> 16 | (Pairs)rounded(high);
#endif
}

// acc[i] += pairs[i].low * other.low + pairs[i].high * other.high
inline F16 dot_pairs(F16 acc, U16 pairs, uint32_t other) {
#if defined(__AVX512BF16__)
  return (F16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(int(other)));
#else
  float low = to_float(bf16(other)), high = to_float(bf16(other >> 16));
  return acc + (F16)(pairs << 16) * low + (F16)(pairs & 0xffff0000u) * high;
#endif
}

#if !defined(__AVX512F__)
inline Sums dot_pairs(Sums acc, Pairs pairs, uint32_t other) {
  Pairs both = Pairs{} + other;
  acc += (Sums)(pairs << 16) * (Sums)(both << 16);
  return acc + (Sums)(pairs & 0xffff0000u) * (Sums)(both & 0xffff0000u);
}
#endif

inline float max_of(Sums v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < REGISTER; i++) m = std::max(m, v[i]);
  return m;
#endif
}

inline float sum_of(Sums v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0;
  for (int i = 0; i < REGISTER; i++) s += v[i];
  return s;
#endif
}

inline bool is_any_above(Sums v, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)(v > broadcast(limit))) != 0;
#else
  return max_of(v) > limit;
#endif
}

// 2^f for f in [0, 1], of a number or a vector. Of all polynomials of degree 5 that are 1 at 0, this one has the
// smallest maximum relative error (8e-8, by Lawson's iteration).
template <class V>
inline V two_to(V f) {
  V p = f * 1.867130050e-3f + 9.017030708e-3f;
  p = p * f + 5.579991266e-2f;
  p = p * f + 2.401644439e-1f;
  p = p * f + 6.931512952e-1f;
  return p * f + 1.0f;
}

// 2^x for x up to 126, with an error of about 2 units in the last place: 2^n * 2^f. For x below -126, returns 2^-126.
inline Sums exp2_of(Sums x) {
#if defined(__AVX512DQ__)
  __m512 y = _mm512_max_ps(_mm512_set1_ps(-126.0f), (__m512)x);  // this order of operands keeps NaN
  return (Sums)_mm512_scalef_ps((__m512)two_to((Sums)_mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF)), y);
#else
  x = x < -126.0f ? broadcast(-126.0f) : x;
  Sums shifted = x - 0.5f + 12582912.0f;  // 1.5 * 2^23: the low bits become x rounded down; the shift drops the rest
  Sums p = two_to(x - (shifted - 12582912.0f));
  return (Sums)((Ints)p + ((Ints)shifted << 23));
#endif
}

// exp(x) for x <= 0.
inline Sums exp_of(Sums x) { return exp2_of(x * LOG2_E); }

// 2^x of one number, at most 126.
inline float exp2_of(float x) {
  x = std::min(std::max(x, -126.0f), 126.0f);
  float n = std::floor(x);
  float p = two_to(x - n);
  int32_t bits;
  std::memcpy(&bits, &p, 4);
  bits += int32_t(n) << 23;
  std::memcpy(&p, &bits, 4);
  return p;
}

inline bf16* data_of(const at::Tensor& t) {
  TORCH_CHECK(t.scalar_type() == at::kBFloat16, "must be bfloat16");
  return reinterpret_cast<bf16*>(t.data_ptr());
}

// Calls work with a count of 1 to 4 as a type (std::integer_sequence<int, 0, 1, ..>), for code that needs it at compile
// time.
template <class Work>
void with_count(int count, const Work& work) {
  switch (count) {
    case 1: return work(std::make_integer_sequence<int, 1>());
    case 2: return work(std::make_integer_sequence<int, 2>());
    case 3: return work(std::make_integer_sequence<int, 3>());
    default: return work(std::make_integer_sequence<int, 4>());
  }
}

// Calls work(i) for every i below n, on all threads; each idle thread takes the next i.
template <class Work>
void for_each_item(int64_t n, const Work& work) {
  int64_t num_threads = std::min<int64_t>(at::get_num_threads(), n);
  if (num_threads <= 1) {
    for (int64_t i = 0; i < n; i++) work(i);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < n; i = next++) work(i);
  });
}

// Calls work(begin, end) for contiguous shares of n, one for each thread.
template <class Work>
void for_each_range(int64_t n, const Work& work) {
  int64_t num_threads = std::min<int64_t>(at::get_num_threads(), n);
  if (num_threads <= 1) return work(int64_t(0), n);
  at::parallel_for(0, num_threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) work(n * i / num_threads, n * (i + 1) / num_threads);
  });
}

}  // namespace tandem
