// What PyTorch has no fused CPU operation for, in bfloat16: RMS norm with the residual sum before it, SiLU and product,
// rotary positions with the write into the KV pool, and paged attention.
//
// Registered as torch.ops.tandem_cpu.*; compiled by engine/kernels/build.py for the machine it runs on. One source for
// all of them: vectors are the compiler's (GCC and Clang lower 64-byte vectors to whatever there is), and only the dot
// product of bfloat16 pairs has an instruction of its own where there is one (AVX512-BF16).
//
// Rounding is that of the same steps in PyTorch, but for rotary positions, which are rounded once instead of three times.
//
// The KV of one layer, [block, 2, head, ...], as these kernels keep it (engine/kv_cache.py: PAIRED_KV_ORDER):
//   keys    [dim / 2, slot, 2]   16 positions' pairs of one dim pair are one vector: scores need no sums across lanes
//   values  [slot / 2, dim, 2]   16 dims' pairs of one slot pair are one vector: neither does the weighted sum

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace {

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t bf16;

constexpr int LANES = 16;
constexpr int KEY_TILES = 4;                       // tiles of 16 keys that are scored together
constexpr int KEYS = KEY_TILES * LANES;
constexpr int ROW_TILE = 6;                        // rows (token, query head) that share a load of keys or values
constexpr int64_t MAX_ROWS = 96;                       // rows of one work item: their scores stay in the L2 cache
constexpr int64_t SPLIT_KEYS = 512;                // a decoding row's context is split into pieces of this many keys
constexpr float MASKED = -1e30f;                   // not infinite: a row whose keys so far were all masked stays finite

// ---------------------------------------------------------------------------------------------------- small things

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

inline F16 broadcast(float x) { return x - F16{}; }

// acc[i] += pairs[i].low * other.low + pairs[i].high * other.high
inline F16 dot_pairs(F16 acc, U16 pairs, uint32_t other) {
#if defined(__AVX512BF16__)
  return (F16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(int(other)));
#else
  float low = to_float(bf16(other)), high = to_float(bf16(other >> 16));
  return acc + (F16)(pairs << 16) * low + (F16)(pairs & 0xffff0000u) * high;
#endif
}

inline float max_of(F16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < LANES; i++) m = std::max(m, v[i]);
  return m;
#endif
}

inline float sum_of(F16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0;
  for (int i = 0; i < LANES; i++) s += v[i];
  return s;
#endif
}

// 2^f for f in [-0.5, 0.5], of one number or of a vector: Taylor's polynomial of degree 6.
template <class V>
inline V two_to(V f) {
  V p = f * 1.54035304e-4f + 1.33335581e-3f;
  p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f;
  p = p * f + 6.93147181e-1f;
  return p * f + 1.0f;
}

// exp(x) for x <= 0, to about 2 units in the last place: 2^n * 2^f.
inline F16 exp_of(F16 x) {
  x = x < -87.0f ? broadcast(-87.0f) : x;
  F16 t = x * 1.44269504f;
  F16 shifted = t + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are t rounded to an integer
  F16 f = t - (shifted - 12582912.0f);
  F16 p = two_to(f);
  I16 n = (I16)shifted - 0x4b400000;
  return (F16)((I16)p + (n << 23));
}

inline float exp_of(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  float t = x * 1.44269504f;
  float n = std::nearbyint(t), f = t - n;
  float p = two_to(f);
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

// Calls work(i) for every i below n, on all threads; whoever is free takes the next.
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

// ------------------------------------------------------------------------------------------------ norms, activation

// out = weight * bf16(x / rms(x)), one row
inline void norm_row(const bf16* x, const bf16* weight, float eps, int64_t D, bf16* out) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < D; i++) {
    float f = to_float(x[i]);
    sum += f * f;
  }
  float scale = 1.0f / std::sqrt(sum / float(D) + eps);
#pragma omp simd
  for (int64_t i = 0; i < D; i++) out[i] = to_bf16(to_float(weight[i]) * to_float(to_bf16(to_float(x[i]) * scale)));
}

// x += delta (where there is one), in place; returns the norm of x. x [T, D] contiguous.
at::Tensor add_rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& delta, const at::Tensor& weight, double eps) {
  int64_t D = x.size(-1), T = x.numel() / D;
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && weight.numel() == D, "x [.., D] and weight [D], contiguous");
  TORCH_CHECK(!delta || (delta->is_contiguous() && delta->numel() == x.numel()), "delta must be like x");
  at::Tensor out = at::empty_like(x);
  bf16 *xp = data_of(x), *op = data_of(out), *dp = delta ? data_of(*delta) : nullptr;
  const bf16* wp = data_of(weight);
  at::parallel_for(0, T, std::max<int64_t>(1, 16384 / D), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      bf16* row = xp + t * D;
      if (dp) {
        const bf16* more = dp + t * D;
#pragma omp simd
        for (int64_t i = 0; i < D; i++) row[i] = to_bf16(to_float(row[i]) + to_float(more[i]));
      }
      norm_row(row, wp, float(eps), D, op + t * D);
    }
  });
  return out;
}

// [T, 2F], gate beside up -> [T, F]: silu(gate) * up
at::Tensor silu_mul(const at::Tensor& gate_up) {
  int64_t F = gate_up.size(-1) / 2, T = gate_up.numel() / (2 * F);
  TORCH_CHECK(gate_up.is_contiguous(), "gate_up must be contiguous");
  at::Tensor out = at::empty({T, F}, gate_up.options());
  const bf16* in = data_of(gate_up);
  bf16* op = data_of(out);
  at::parallel_for(0, T, std::max<int64_t>(1, 8192 / F), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const bf16 *gate = in + t * 2 * F, *up = gate + F;
      bf16* row = op + t * F;
#pragma omp simd
      for (int64_t i = 0; i < F; i++) {
        float g = to_float(gate[i]);
        float activated = g < -88.0f ? -0.0f : to_float(to_bf16(g / (1.0f + exp_of(-g))));
        row[i] = to_bf16(activated * to_float(up[i]));
      }
    }
  });
  return out;
}

// --------------------------------------------------------------------------------------- rotary positions, KV write

// One head, rotated: out = x * cos + rotate_half(x) * sin, whose sign is in the table.
inline void rotate_head(const bf16* x, const bf16* cos, const bf16* sin, int64_t H, bf16* out) {
  int64_t half = H / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    float low = to_float(x[i]), high = to_float(x[i + half]);
    out[i] = to_bf16(low * to_float(cos[i]) + high * to_float(sin[i]));
    out[i + half] = to_bf16(high * to_float(cos[i + half]) + low * to_float(sin[i + half]));
  }
}

// qkv [T, (N + 2K) * H]: queries and keys are normed (where there are weights) and rotated, keys and values stored in
// one layer of the pool at slot_mapping [T]. Returns the queries [T, N, H].
at::Tensor rotate_and_store(
    const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const std::optional<at::Tensor>& q_norm,
    const std::optional<at::Tensor>& k_norm, double eps, const at::Tensor& kv, const at::Tensor& slot_mapping) {
  int64_t K = kv.size(2), block_size = kv.size(3), H = kv.size(4), T = qkv.size(0);
  int64_t X = qkv.size(1) / H, N = X - 2 * K;
  TORCH_CHECK(qkv.is_contiguous() && cos.is_contiguous() && sin.is_contiguous() && kv.is_contiguous(), "contiguous");
  TORCH_CHECK(cos.numel() == T * H && sin.numel() == T * H && slot_mapping.numel() == T, "one row per token");
  TORCH_CHECK(block_size % LANES == 0 && H % LANES == 0 && H <= 256, "16 must divide block and head size");
  at::Tensor out = at::empty({T, N, H}, qkv.options());
  const bf16 *in = data_of(qkv), *cp = data_of(cos), *sp = data_of(sin);
  const bf16 *qw = q_norm ? data_of(*q_norm) : nullptr, *kw = k_norm ? data_of(*k_norm) : nullptr;
  bf16 *op = data_of(out), *pool = data_of(kv);
  const int64_t* slots = slot_mapping.data_ptr<int64_t>();
  int64_t plane = block_size * H;
  at::parallel_for(0, T, std::max<int64_t>(1, 16384 / (X * H)), [&](int64_t begin, int64_t end) {
    bf16 normed[256], rotated[256];
    for (int64_t t = begin; t < end; t++) {
      const bf16 *row = in + t * X * H, *c = cp + t * H, *s = sp + t * H;
      for (int64_t n = 0; n < N; n++) {
        const bf16* head = row + n * H;
        if (qw) norm_row(head, qw, float(eps), H, normed), head = normed;
        rotate_head(head, c, s, H, op + (t * N + n) * H);
      }
      int64_t block = slots[t] / block_size, slot = slots[t] % block_size;
      for (int64_t k = 0; k < K; k++) {
        const bf16* head = row + (N + k) * H;
        if (kw) norm_row(head, kw, float(eps), H, normed), head = normed;
        rotate_head(head, c, s, H, rotated);
        bf16* keys = pool + ((block * 2) * K + k) * plane + slot * 2;
        for (int64_t d = 0; d < H; d += 2) std::memcpy(keys + d * block_size, rotated + d, 4);
        const bf16* v = row + (N + K + k) * H;
        bf16* values = pool + ((block * 2 + 1) * K + k) * plane + (slot / 2) * 2 * H + (slot & 1);
        for (int64_t d = 0; d < H; d++) values[2 * d] = v[d];
      }
    }
  });
  return out;
}

// --------------------------------------------------------------------------------------------------------- attention

// Scores of R rows against NJ tiles of 16 keys: score[r * KEYS + 16 j ..]. `stride`: pairs from one dim pair to the next.
template <int R, int NJ>
void score_tile(const uint32_t* q, int64_t dim_pairs, const uint32_t* const* keys, int64_t stride, float* score) {
  F16 acc[R][NJ] = {};
  for (int64_t d = 0; d < dim_pairs; d++) {
    U16 k[NJ];
    for (int j = 0; j < NJ; j++) k[j] = load<U16>(keys[j] + d * stride);
    for (int r = 0; r < R; r++)
      for (int j = 0; j < NJ; j++) acc[r][j] = dot_pairs(acc[r][j], k[j], q[r * dim_pairs + d]);
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < NJ; j++) store(score + r * KEYS + j * LANES, acc[r][j]);
}

// out[r, 16 * ND dims] = out * rescale[r] + sum over NJ tiles of p[r, key] * value[key]
template <int R, int ND>
void weigh_tile(
    const uint32_t* p, const uint32_t* const* values, int num_tiles, int64_t H, const float* rescale, float* out) {
  F16 acc[R][ND];
  for (int r = 0; r < R; r++)
    for (int d = 0; d < ND; d++) acc[r][d] = load<F16>(out + r * H + d * LANES) * rescale[r];
  for (int j = 0; j < num_tiles; j++)
    for (int s = 0; s < LANES / 2; s++) {
      U16 v[ND];
      for (int d = 0; d < ND; d++) v[d] = load<U16>(values[j] + s * H + d * LANES);
      for (int r = 0; r < R; r++)
        for (int d = 0; d < ND; d++) acc[r][d] = dot_pairs(acc[r][d], v[d], p[r * (KEYS / 2) + j * (LANES / 2) + s]);
    }
  for (int r = 0; r < R; r++)
    for (int d = 0; d < ND; d++) store(out + r * H + d * LANES, acc[r][d]);
}

template <int R>
void score_rows(int num_tiles, const uint32_t* q, int64_t dim_pairs, const uint32_t* const* keys, int64_t stride, float* score) {
  switch (num_tiles) {
    case 1: return score_tile<R, 1>(q, dim_pairs, keys, stride, score);
    case 2: return score_tile<R, 2>(q, dim_pairs, keys, stride, score);
    case 3: return score_tile<R, 3>(q, dim_pairs, keys, stride, score);
    default: return score_tile<R, 4>(q, dim_pairs, keys, stride, score);
  }
}

template <int R>
void weigh_rows(
    const uint32_t* p, const uint32_t* const* values, int num_tiles, int64_t H, const float* rescale, float* out) {
  const uint32_t* at[KEY_TILES];
  for (int64_t d = 0; d < H;) {
    for (int j = 0; j < num_tiles; j++) at[j] = values[j] + d;
    int64_t left = (H - d) / LANES;
    if (left >= 4) weigh_tile<R, 4>(p, at, num_tiles, H, rescale, out + d), d += 4 * LANES;
    else if (left >= 2) weigh_tile<R, 2>(p, at, num_tiles, H, rescale, out + d), d += 2 * LANES;
    else weigh_tile<R, 1>(p, at, num_tiles, H, rescale, out + d), d += LANES;
  }
}

using ScoreRows = void (*)(int, const uint32_t*, int64_t, const uint32_t* const*, int64_t, float*);
using WeighRows = void (*)(const uint32_t*, const uint32_t* const*, int, int64_t, const float*, float*);
constexpr ScoreRows SCORE_ROWS[] = {score_rows<1>, score_rows<2>, score_rows<3>, score_rows<4>, score_rows<5>, score_rows<6>};
constexpr WeighRows WEIGH_ROWS[] = {weigh_rows<1>, weigh_rows<2>, weigh_rows<3>, weigh_rows<4>, weigh_rows<5>, weigh_rows<6>};

// Some tokens of one sequence, some key heads with all query heads that share them, and a range of keys. Either tokens or
// key heads are one: a single token goes through all heads of a block before the next block, since memory is read faster
// in order, while of many tokens each goes through the keys of one head, which the cache then holds.
struct Item {
  int64_t seq, kv_head, num_kv_heads, first_token, num_tokens, first_key, end_key;
  int64_t partial;  // where its first unfinished row goes, where the range is one of several; else -1
};

// Per thread. Online softmax: M. Milakov, N. Gimelshein, 2018; tiled as in T. Dao, "FlashAttention-2", 2023.
struct Scratch {
  std::vector<uint32_t> q, p;
  std::vector<float> score, out, largest, sum, rescale;
  explicit Scratch(int64_t H)
      : q(MAX_ROWS * H / 2), p(MAX_ROWS * KEYS / 2), score(MAX_ROWS * KEYS), out(MAX_ROWS * H), largest(MAX_ROWS),
        sum(MAX_ROWS), rescale(MAX_ROWS) {}
};

struct Attention {
  const bf16* q;           // [T, N, H]
  const uint32_t* pool;    // one layer, in pairs
  const int32_t* tables;   // [S, max_blocks]
  int64_t N, K, H, block_size, max_blocks, window;
  float scale;
  bf16* out;               // [T, N * H]

  int64_t num_rows(const Item& item) const { return item.num_kv_heads * item.num_tokens * (N / K); }

  // Which token and query head a row is: row = (key head * tokens + token) * G + query head of that key head.
  int64_t head_of_row(const Item& item, int64_t r) const {
    int64_t G = N / K, per_kv_head = item.num_tokens * G;
    int64_t token = r % per_kv_head / G, head = (item.kv_head + r / per_kv_head) * G + r % G;
    return (item.first_token + token) * N + head;
  }

  // Fills scratch.out, not yet divided by scratch.sum.
  void run(const Item& item, int64_t position, Scratch& scratch) const {
    int64_t G = N / K, per_kv_head = item.num_tokens * G, rows = num_rows(item), pairs = H / 2;
    int64_t plane = block_size * pairs;
    for (int64_t r = 0; r < rows; r++)
      std::memcpy(scratch.q.data() + r * pairs, q + head_of_row(item, r) * H, H * sizeof(bf16));
    std::fill_n(scratch.out.data(), rows * H, 0.0f);
    std::fill_n(scratch.largest.data(), rows, MASKED);
    std::fill_n(scratch.sum.data(), rows, 0.0f);
    for (int64_t key = item.first_key; key < item.end_key; key += KEYS) {
      int num_tiles = int(std::min<int64_t>(KEY_TILES, (item.end_key - key + LANES - 1) / LANES));
      const uint32_t *keys[KEY_TILES], *values[KEY_TILES];
      for (int j = 0; j < num_tiles; j++) {
        int64_t at = key + j * LANES, slot = at % block_size;
        const uint32_t* block = pool + int64_t(tables[item.seq * max_blocks + at / block_size]) * 2 * K * plane;
        keys[j] = block + item.kv_head * plane + slot;
        values[j] = block + (K + item.kv_head) * plane + slot / 2 * H;
      }
      for_each_row_tile(item, per_kv_head, plane, num_tiles, keys, [&](int64_t r, int64_t n) {
        SCORE_ROWS[n - 1](num_tiles, scratch.q.data() + r * pairs, pairs, keys, block_size, scratch.score.data() + r * KEYS);
      });
      for (int64_t r = 0; r < rows; r++) soften(scratch, r, key, num_tiles, position + r % per_kv_head / G);
      for_each_row_tile(item, per_kv_head, plane, num_tiles, values, [&](int64_t r, int64_t n) {
        WEIGH_ROWS[n - 1](
            scratch.p.data() + r * (KEYS / 2), values, num_tiles, H, scratch.rescale.data() + r, scratch.out.data() + r * H);
      });
    }
  }

  // Calls work(first row, number of rows) key head by key head, with `tiles` moved on from one head's plane to the next's.
  template <class Work>
  static void for_each_row_tile(
      const Item& item, int64_t per_kv_head, int64_t plane, int num_tiles, const uint32_t** tiles, const Work& work) {
    for (int64_t k = 0; k < item.num_kv_heads; k++) {
      for (int64_t r = 0; r < per_kv_head; r += ROW_TILE)
        work(k * per_kv_head + r, std::min<int64_t>(ROW_TILE, per_kv_head - r));
      for (int j = 0; j < num_tiles; j++) tiles[j] += plane;
    }
  }

  // One row's scores become weights, rounded to bfloat16 pairs; its sum, its largest score and its rescaling follow.
  void soften(Scratch& scratch, int64_t r, int64_t key, int num_tiles, int64_t position) const {
    float* score = scratch.score.data() + r * KEYS;
    const I16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F16 s[KEY_TILES], top = broadcast(MASKED);
    bool is_cut = key + num_tiles * LANES > position + 1 || (window && key <= position - window);
    for (int j = 0; j < num_tiles; j++) {
      s[j] = load<F16>(score + j * LANES) * scale;
      if (is_cut) {
        I16 behind = int32_t(position - key - j * LANES) - lane;  // how far before the row's own position
        s[j] = behind < 0 ? broadcast(MASKED) : s[j];
        if (window) s[j] = behind >= int32_t(window) ? broadcast(MASKED) : s[j];
      }
      top = s[j] > top ? s[j] : top;
    }
    float before = scratch.largest[r], largest = std::max(before, max_of(top));
    F16 sum = {};
    bf16* p = reinterpret_cast<bf16*>(scratch.p.data() + r * (KEYS / 2));
    for (int j = 0; j < num_tiles; j++) {
      F16 weight = exp_of(s[j] - largest);
      sum += weight;
#if defined(__AVX512BF16__)
      store(p + j * LANES, _mm512_cvtneps_pbh((__m512)weight));
#else
      for (int i = 0; i < LANES; i++) p[j * LANES + i] = to_bf16(weight[i]);
#endif
    }
    float rescale = before == largest ? 1.0f : exp_of(before - largest);
    scratch.rescale[r] = rescale;
    scratch.sum[r] = scratch.sum[r] * rescale + sum_of(sum);
    scratch.largest[r] = largest;
  }

  void finish(const Item& item, int64_t r, const float* row, float sum) const {
    float inverse = 1.0f / sum;
    bf16* to = out + head_of_row(item, r) * H;
#pragma omp simd
    for (int64_t d = 0; d < H; d++) to[d] = to_bf16(row[d] * inverse);
  }
};

// q [T, N, H] -> [T, N * H]. Sequence i computes query_lens[i] tokens, the last ones of its context_lens[i]; its blocks
// are block_tables[i]. All three int32. window > 0: only the last so many keys, the token's own counted.
at::Tensor paged_attention(
    const at::Tensor& q, const at::Tensor& kv, const at::Tensor& block_tables, const at::Tensor& query_lens,
    const at::Tensor& context_lens, double scale, int64_t window) {
  int64_t T = q.size(0), N = q.size(1), H = q.size(2), S = block_tables.size(0);
  int64_t K = kv.size(2), block_size = kv.size(3), G = N / K;
  TORCH_CHECK(q.is_contiguous() && kv.is_contiguous() && block_tables.is_contiguous(), "contiguous");
  TORCH_CHECK(block_size % LANES == 0 && H % LANES == 0 && H == kv.size(4), "16 must divide block and head size");
  TORCH_CHECK(N % K == 0 && G <= MAX_ROWS, "query heads must share key heads evenly");
  at::Tensor out = at::empty({T, N * H}, q.options());
  Attention attention{data_of(q), reinterpret_cast<const uint32_t*>(data_of(kv)), block_tables.data_ptr<int32_t>(),
                      N, K, H, block_size, block_tables.size(1), window, float(scale), data_of(out)};
  const int32_t *lens = query_lens.data_ptr<int32_t>(), *contexts = context_lens.data_ptr<int32_t>();

  // Long contexts of single tokens are split, so that all threads have work; the pieces are put together below. Always,
  // so that a sequence's numbers do not depend on the batch or the threads.
  int64_t tile = std::max<int64_t>(1, std::min<int64_t>(32, MAX_ROWS / G));
  // All heads of a sequence together, unless that leaves threads without work.
  int64_t heads_together = S >= 4 * at::get_num_threads() ? std::min(K, MAX_ROWS / G) : 1;
  std::vector<Item> items;
  std::vector<int64_t> positions;
  int64_t num_partials = 0, first_token = 0;
  for (int64_t seq = 0; seq < S; first_token += lens[seq++])
    for (int64_t start = 0; start < lens[seq]; start += tile) {
      int64_t num_tokens = std::min<int64_t>(tile, lens[seq] - start), position = contexts[seq] - lens[seq] + start;
      int64_t begin = window ? std::max<int64_t>(0, position - window + 1) / LANES * LANES : 0;
      int64_t end = position + num_tokens;
      int64_t piece = lens[seq] == 1 ? SPLIT_KEYS : end - begin;
      int64_t heads = num_tokens == 1 ? heads_together : 1;
      for (int64_t k = 0; k < K; k += heads)
        for (int64_t key = begin; key < end; key += piece) {
          int64_t num_kv_heads = std::min(heads, K - k);
          items.push_back({seq, k, num_kv_heads, first_token + start, num_tokens, key, std::min(key + piece, end), -1});
          positions.push_back(position);
          if (end - begin > piece) items.back().partial = num_partials, num_partials += attention.num_rows(items.back());
        }
    }

  std::vector<float> partial_out(num_partials * H), partial_sum(num_partials), partial_largest(num_partials);
  int64_t num_items = items.size();
  std::atomic<int64_t> next{0};
  auto work_until_done = [&](int64_t, int64_t) {
    Scratch scratch(H);
    for (int64_t i = num_items - 1 - next++; i >= 0; i = num_items - 1 - next++) {  // from the end: the longest first
      const Item& item = items[i];
      attention.run(item, positions[i], scratch);
      for (int64_t r = 0; r < attention.num_rows(item); r++) {
        if (item.partial < 0) {
          attention.finish(item, r, scratch.out.data() + r * H, scratch.sum[r]);
          continue;
        }
        int64_t at = item.partial + r;
        std::memcpy(&partial_out[at * H], scratch.out.data() + r * H, H * sizeof(float));
        partial_sum[at] = scratch.sum[r];
        partial_largest[at] = scratch.largest[r];
      }
    }
  };
  int64_t num_threads = std::min<int64_t>(at::get_num_threads(), num_items);
  if (num_threads > 1) at::parallel_for(0, num_threads, 1, work_until_done);
  else work_until_done(0, 1);

  for (int64_t i = 0; i < num_items;) {  // pieces of one token's heads stand side by side
    if (items[i].partial < 0) {
      i++;
      continue;
    }
    int64_t end = i + 1;
    while (end < num_items && items[end].seq == items[i].seq && items[end].kv_head == items[i].kv_head) end++;
    for (int64_t r = 0; r < attention.num_rows(items[i]); r++) {
      float largest = MASKED, sum = 0;
      for (int64_t j = i; j < end; j++) largest = std::max(largest, partial_largest[items[j].partial + r]);
      std::vector<float> row(H, 0.0f);
      for (int64_t j = i; j < end; j++) {
        int64_t at = items[j].partial + r;
        float weight = exp_of(partial_largest[at] - largest);
        sum += weight * partial_sum[at];
        for (int64_t d = 0; d < H; d++) row[d] += weight * partial_out[at * H + d];
      }
      attention.finish(items[i], r, row.data(), sum);
    }
    i = end;
  }
  return out;
}

// ------------------------------------------------------------------------------------------------------------- layer

// x @ weight.T + bias by oneDNN, its weight in oneDNN's blocked order if `is_packed`.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool is_packed) {
  if (!is_packed) return at::linear(x, weight, bias);
  using Packed = at::Tensor(
      const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, c10::string_view,
      c10::List<std::optional<at::Scalar>>, std::optional<c10::string_view>);
  static const auto packed =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Packed>();
  static const c10::List<std::optional<at::Scalar>> no_scalars;
  return packed.call(x, weight, bias, "none", no_scalars, "");
}

// One decoder layer (engine/models/decoder.py: DecoderLayer) as one call: what is between the products takes microseconds
// with few tokens, and so does every call from Python.
struct DecoderLayer : torch::CustomClassHolder {
  // Weight and bias of: qkv, output, gate beside up, down.
  std::vector<at::Tensor> weights;
  std::vector<std::optional<at::Tensor>> biases;
  at::Tensor input_norm, post_attention_norm;
  std::optional<at::Tensor> q_norm, k_norm;
  double eps, scale;
  int64_t window;
  bool is_packed;

  DecoderLayer(
      std::vector<at::Tensor> weights, std::vector<std::optional<at::Tensor>> biases, at::Tensor input_norm,
      at::Tensor post_attention_norm, std::optional<at::Tensor> q_norm, std::optional<at::Tensor> k_norm, double eps,
      double scale, int64_t window, bool is_packed)
      : weights(std::move(weights)), biases(std::move(biases)), input_norm(std::move(input_norm)),
        post_attention_norm(std::move(post_attention_norm)), q_norm(std::move(q_norm)), k_norm(std::move(k_norm)),
        eps(eps), scale(scale), window(window), is_packed(is_packed) {}

  at::Tensor product(int which, const at::Tensor& x) const { return linear(x, weights[which], biases[which], is_packed); }

  // x [T, D] becomes x + delta and what attention adds to it; returns what the feed-forward adds, still to be added.
  at::Tensor forward(
      const at::Tensor& x, const std::optional<at::Tensor>& delta, const at::Tensor& kv, const at::Tensor& cos,
      const at::Tensor& sin, const at::Tensor& slot_mapping, const at::Tensor& block_tables,
      const at::Tensor& query_lens, const at::Tensor& context_lens) const {
    at::Tensor qkv = product(0, add_rms_norm(x, delta, input_norm, eps));
    at::Tensor q = rotate_and_store(qkv, cos, sin, q_norm, k_norm, eps, kv, slot_mapping);
    at::Tensor attended = paged_attention(q, kv, block_tables, query_lens, context_lens, scale, window);
    at::Tensor h = add_rms_norm(x, product(1, attended), post_attention_norm, eps);
    return product(3, silu_mul(product(2, h)));
  }
};

// All layers as one call.
struct DecoderLayers : torch::CustomClassHolder {
  std::vector<c10::intrusive_ptr<DecoderLayer>> layers;

  void add(const c10::intrusive_ptr<DecoderLayer>& layer) { layers.push_back(layer); }

  // x [T, D] is overwritten; returns the hidden state after all layers. kv_pool [layer, block, ...].
  at::Tensor forward(
      const at::Tensor& x, const at::Tensor& kv_pool, const at::Tensor& cos, const at::Tensor& sin,
      const at::Tensor& slot_mapping, const at::Tensor& block_tables, const at::Tensor& query_lens,
      const at::Tensor& context_lens) const {
    std::optional<at::Tensor> delta;
    for (size_t i = 0; i < layers.size(); i++)
      delta = layers[i]->forward(
          x, delta, kv_pool.select(0, int64_t(i)), cos, sin, slot_mapping, block_tables, query_lens, context_lens);
    return delta ? at::add(x, *delta) : x;
  }
};

// ---------------------------------------------------------------------------------------------------------- sampling

typedef uint64_t W16 __attribute__((vector_size(128)));

// Philox4x32-10 (engine/random.py) of 16 counters (block.., sequence_index, position, 0): word j of lane i is of token
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

// One token of a row at random: engine/sampler.py, step 9, without filters. Scores of all in float32, of those that come
// near the best in float64. -1 where a logit is a NaN.
int64_t race(const float* logits, int64_t V, double temperature, uint64_t seed, uint32_t sequence_index, uint32_t position,
             std::vector<float>& scores) {
  float largest = -INFINITY;
  bool has_nan = false;
  for (int64_t i = 0; i < V; i++) {
    has_nan |= logits[i] != logits[i];
    largest = std::max(largest, logits[i]);
  }
  if (has_nan || largest == -INFINITY) return -1;
  const U16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const float inverse = float(std::min(1.0 / temperature, 1e30));  // finite: the largest logit's distance is 0
  const double scale = 1.0 / 4294967296.0;
  scores.resize(V + 4 * LANES);
  float best = -INFINITY;
  for (int64_t first = 0; first < V; first += 4 * LANES) {
    U16 words[4] = {lane + uint32_t(first / 4), U16{} + sequence_index, U16{} + position, U16{}};
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
    U16 words[4] = {U16{} + uint32_t(i / 4), U16{} + sequence_index, U16{} + position, U16{}};
    philox(words, seed);
    double clock = -std::log((double(words[i & 3][0]) + 0.5) * scale);
    double exact = (double(logits[i]) - double(largest)) / temperature - std::log(clock);
    if (exact > best_exact) best_exact = exact, winner = i;
  }
  return winner;
}

// logits [R, V] in bfloat16. Returns the index of each row's largest, the first of equals; -1 where there is a NaN.
at::Tensor largest(const at::Tensor& logits) {
  int64_t R = logits.size(0), V = logits.size(1);
  TORCH_CHECK(logits.is_contiguous(), "logits must be contiguous");
  at::Tensor out = at::empty({R}, logits.options().dtype(at::kLong));
  const bf16* in = data_of(logits);
  int64_t* token_ids = out.data_ptr<int64_t>();
  for_each_item(R, [&](int64_t r) {
    const bf16* row = in + r * V;
    // As integers in the order of the floats: negative ones have their bits turned over. NaNs are beyond infinity.
    int16_t most = INT16_MIN, least = INT16_MAX;
#pragma omp simd reduction(max : most) reduction(min : least)
    for (int64_t i = 0; i < V; i++) {
      int16_t bits = int16_t(row[i]), key = int16_t(bits ^ ((bits >> 15) & 0x7fff));
      most = std::max(most, key);
      least = std::min(least, key);
    }
    constexpr int16_t INFINITE = 0x7f80;
    if (most > INFINITE || least < int16_t(~INFINITE)) {
      token_ids[r] = -1;
      return;
    }
    for (int64_t i = 0; i < V; i++) {
      int16_t bits = int16_t(row[i]), key = int16_t(bits ^ ((bits >> 15) & 0x7fff));
      if (key == most || (most == 0 && key == -1)) {  // 0 and -0 are equals
        token_ids[r] = i;
        return;
      }
    }
  });
  return out;
}

// logits [R, V] in bfloat16 or float32; the others [R]. Returns token ids [R].
at::Tensor sample(
    const at::Tensor& logits, const at::Tensor& temperatures, const at::Tensor& seeds, const at::Tensor& sequence_indices,
    const at::Tensor& positions) {
  int64_t R = logits.size(0), V = logits.size(1);
  TORCH_CHECK(logits.is_contiguous() && V < (int64_t(1) << 32), "logits [R, V], contiguous");
  bool is_float = logits.scalar_type() == at::kFloat;
  at::Tensor out = at::empty({R}, seeds.options());
  const bf16* halves = is_float ? nullptr : data_of(logits);
  int64_t* token_ids = out.data_ptr<int64_t>();
  for_each_item(R, [&](int64_t r) {
    std::vector<float> scores, wide;
    const float* row = is_float ? logits.data_ptr<float>() + r * V : nullptr;
    if (!is_float) {
      wide.resize(V);
      for (int64_t i = 0; i < V; i++) wide[i] = to_float(halves[r * V + i]);
      row = wide.data();
    }
    token_ids[r] = race(
        row, V, temperatures.data_ptr<double>()[r], uint64_t(seeds.data_ptr<int64_t>()[r]),
        uint32_t(sequence_indices.data_ptr<int64_t>()[r]), uint32_t(positions.data_ptr<int64_t>()[r]), scores);
  });
  return out;
}

// Freed memory stays with the process: else every step's large tensors are mapped, cleared and unmapped anew by the
// kernel, a third of the time of a long prompt. glibc only; elsewhere it does nothing.
void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
}

}  // namespace

TORCH_LIBRARY(tandem_cpu, m) {
  using Tensors = std::vector<at::Tensor>;
  using Biases = std::vector<std::optional<at::Tensor>>;
  m.class_<DecoderLayer>("DecoderLayer")
      .def(torch::init<
           Tensors, Biases, at::Tensor, at::Tensor, std::optional<at::Tensor>, std::optional<at::Tensor>, double, double,
           int64_t, bool>())
      .def("forward", &DecoderLayer::forward);
  m.class_<DecoderLayers>("DecoderLayers")
      .def(torch::init<>())
      .def("add", &DecoderLayers::add)
      .def("forward", &DecoderLayers::forward);
  m.def("add_rms_norm(Tensor(a!) x, Tensor? delta, Tensor weight, float eps) -> Tensor", &add_rms_norm);
  m.def("silu_mul(Tensor gate_up) -> Tensor", &silu_mul);
  m.def(
      "rotate_and_store(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm, float eps, Tensor(a!) kv, "
      "Tensor slot_mapping) -> Tensor",
      &rotate_and_store);
  m.def(
      "paged_attention(Tensor q, Tensor kv, Tensor block_tables, Tensor query_lens, Tensor context_lens, float scale, "
      "int window) -> Tensor",
      &paged_attention);
  m.def("largest(Tensor logits) -> Tensor", &largest);
  m.def("sample(Tensor logits, Tensor temperatures, Tensor seeds, Tensor sequence_indices, Tensor positions) -> Tensor", &sample);
  m.def("keep_freed_memory() -> ()", &keep_freed_memory);
}
