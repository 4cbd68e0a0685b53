// Attention to latents (engine/models/latent_attention.py), absorbed: all query heads attend to one key of R numbers, of
// which the first C, the latent, are also the value.
//
//   q [T, N * (Q + P)] ──absorb──> [T, N, R]; the step's latents and rotated keys go into the pool
//   [T, N, R] ──latent_attention──> sums of latents, head by head; each head's own product ──> [T, N * V]
//
// A token has the same bits in any step, since prompts are computed in this form, too. (Keys and values of heads would
// take fewer multiplications for a long prompt, but give other bits than decoding does.)
#pragma once

#include <ATen/ops/empty.h>

#include <vector>

#include "attention.h"
#include "matmul.h"
#include "rows.h"

namespace tandem {

// Turns 16 keys over, so that sums of values need no sums across lanes: [dim / 2, slot, 2], where `stride` pairs lie
// between two pairs of dims, to [slot / 2, dim, 2].
inline void turn_over(const uint32_t* __restrict keys, int64_t stride, int64_t num_dims, uint32_t* __restrict values) {
#if defined(__AVX512BW__)
  // 16 dims at a time. A vector is 8 slot pairs of one dim pair, 64 bits each; these 8 by 8 are transposed.
  const __m512i by_dim = _mm512_set_epi16(
      31, 29, 30, 28, 27, 25, 26, 24, 23, 21, 22, 20, 19, 17, 18, 16, 15, 13, 14, 12, 11, 9, 10, 8, 7, 5, 6, 4, 3, 1, 2, 0);
  const __m512i first[] = {
      _mm512_set_epi64(14, 6, 12, 4, 10, 2, 8, 0), _mm512_set_epi64(13, 12, 5, 4, 9, 8, 1, 0), _mm512_set_epi64(11, 10, 9, 8, 3, 2, 1, 0)};
  const __m512i second[] = {
      _mm512_set_epi64(15, 7, 13, 5, 11, 3, 9, 1), _mm512_set_epi64(15, 14, 7, 6, 11, 10, 3, 2), _mm512_set_epi64(15, 14, 13, 12, 7, 6, 5, 4)};
  for (int64_t d = 0; d < num_dims; d += LANES) {
    __m512i rows[8];
    for (int i = 0; i < 8; i++) rows[i] = _mm512_permutexvar_epi16(by_dim, load<__m512i>(keys + (d / 2 + i) * stride));
#pragma GCC unroll 3
    for (int level = 0; level < 3; level++)
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        const int other = i + (1 << level);
        if (i & (1 << level)) continue;
        const __m512i low = _mm512_permutex2var_epi64(rows[i], first[level], rows[other]);
        rows[other] = _mm512_permutex2var_epi64(rows[i], second[level], rows[other]);
        rows[i] = low;
      }
    for (int i = 0; i < 8; i++) store(values + i * num_dims + d, rows[i]);
  }
#else
  for (int64_t pair = 0; pair < num_dims / 2; pair++)
    for (int s = 0; s < LANES / 2; s++) {
      const uint32_t one = keys[pair * stride + 2 * s], other = keys[pair * stride + 2 * s + 1];
      uint32_t* to = values + s * num_dims + 2 * pair;
      to[0] = (one & 0xffff) | other << 16;
      to[1] = one >> 16 | (other & 0xffff0000);
    }
#endif
}

// The latents and rotated keys in one layer, [block, 1, 1, dim / 2, slot, 2] (engine/kv_cache.py:
// PAIRED_LATENT_KV_ORDER). Query heads may be divided among as many "key heads" as one likes: all have this key.
struct PoolOfLatents {
  const uint32_t* data;  // in pairs
  int64_t block_size, key_dim, value_dim;

  int64_t pairs_of_head() const { return 0; }

  const uint32_t* keys(int64_t block, int64_t, int64_t slot) const { return data + block * block_size * key_dim / 2 + slot; }

  // The values of 16 slots, turned over into `room`.
  const uint32_t* values(int64_t block, int64_t head, int64_t slot, uint32_t* room) const {
    turn_over(keys(block, head, slot), block_size, value_dim, room);
    return room;
  }
};

// How many query heads an item takes. All of them share the work of turning keys over, but there should be an item for
// each thread.
inline int64_t heads_of_item(int64_t N, int64_t num_seqs, const int32_t* context_lens) {
  int64_t heads = std::min(N, MAX_ROWS), num_items = 0;
  for (int64_t seq = 0; seq < num_seqs; seq++) num_items += (context_lens[seq] + PIECE_KEYS - 1) / PIECE_KEYS;
  while (N % heads) heads--;
  while (heads % 2 == 0 && heads > ROW_TILE && num_items * (N / heads) < at::get_num_threads()) heads /= 2;
  return heads;
}

// A product for each head: x [N, T, K] with the head's panels. Writes rows [T, num_outputs]: of token t and head n at
// to + t * of_token + n * of_head.
struct HeadsOutputs {
  bf16* to;
  int64_t of_token, of_head, num_outputs;
};

inline void multiply_heads(
    const bf16* x, int64_t T, int64_t N, const at::Tensor& weight, const OfOutputs& scale, const HeadsOutputs& out) {
  if (T == 0) return;
  const Panels panels(weight);
  const ScaleAndBias given(scale, std::nullopt);
  const int64_t panels_of_head = panels.num_panels / N, K = 2 * panels.pairs;
  for_each_range(panels.num_panels, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin, last; first < end; first = last) {
      const int64_t head = first / panels_of_head;
      last = std::min(end, (head + 1) * panels_of_head);
      const char* after = last < end ? panels.at(last, 0) : nullptr;
      bf16* of_head = out.to + head * out.of_head;
      multiply_share(x + head * T * K, T, panels, first, last, after, [&](int64_t row, int64_t panel, F16* sums) {
        given.apply(panel, sums);
        const int64_t at = (panel - head * panels_of_head) * PANEL;
        bf16 rounded[PANEL];
        store_bf16(rounded, sums[0]);
        store_bf16(rounded + LANES, sums[1]);
        std::memcpy(of_head + row * out.of_token + at, rounded, std::min(PANEL, out.num_outputs - at) * sizeof(bf16));
      });
    }
  });
}

inline void check_heads(const at::Tensor& weight, const OfOutputs& scale, int64_t N, int64_t num_inputs, int64_t num_outputs) {
  const Panels panels(weight);
  TORCH_CHECK(2 * panels.pairs == num_inputs, "a head's weight must have ", num_inputs, " inputs");
  TORCH_CHECK(panels.num_panels == N * ((num_outputs + PANEL - 1) / PANEL), "each head must have its own panels, of ", num_outputs, " outputs");
  TORCH_CHECK(scale.has_value() == (weight.scalar_type() == at::kChar), "scale: for a weight of int8, and for no other");
  TORCH_CHECK(!scale || (scale->is_contiguous() && scale->numel() == panels.num_panels * PANEL), "scale: one number an output of a panel");
}

// x [N, T, K], N heads' weights in panels -> [T, N, num_outputs]
at::Tensor heads_multiplied(const at::Tensor& x, const at::Tensor& weight, const OfOutputs& scale, int64_t num_outputs) {
  const int64_t N = x.size(0), T = x.size(1);
  TORCH_CHECK(x.is_contiguous(), "x [N, T, K], contiguous");
  check_heads(weight, scale, N, x.size(2), num_outputs);
  at::Tensor out = at::empty({T, N, num_outputs}, x.options());
  multiply_heads(data_of(x), T, N, weight, scale, {data_of(out), N * num_outputs, num_outputs, num_outputs});
  return out;
}

// A step's latents [T, R], before their norm, with what norms them and rotates their keys, and where they go: one layer
// of the pool, at slot_mapping [T].
struct StepLatents {
  const at::Tensor &latent, &cos, &sin, &norm;
  double eps;
  const at::Tensor &kv, &slot_mapping;

  int64_t num_tokens() const { return latent.size(0); }
  int64_t rotated_dim() const { return cos.size(-1); }
  int64_t latent_dim() const { return norm.numel(); }
  int64_t key_dim() const { return latent_dim() + rotated_dim(); }

  void check() const {
    const int64_t T = num_tokens(), P = rotated_dim(), C = latent_dim(), R = key_dim();
    TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && norm.is_contiguous() && kv.is_contiguous(), "contiguous");
    TORCH_CHECK(latent.stride(1) == 1 && latent.size(1) == R && kv.size(4) == R, "latents and the pool must have C + P numbers");
    TORCH_CHECK(cos.numel() == T * P && sin.numel() == T * P && slot_mapping.numel() == T, "one row per token");
    TORCH_CHECK(
        P % 2 == 0 && R % LANES == 0 && C % LANES == 0 && kv.size(3) % LANES == 0, "16 must divide latents, keys and the block size");
  }

  // Norms and rotates token t, and stores it. room: R numbers.
  template <class Table> void store(int64_t t, const Table* c, const Table* s, bf16* room) const {
    const int64_t C = latent_dim(), P = rotated_dim(), R = C + P, block_size = kv.size(3);
    const bf16* row = data_of(latent) + t * latent.stride(0);
    norm_row(row, data_of(norm), float(eps), C, room);
    rotate_head(row + C, c, s, P, P, room + C);
    const int64_t slot = slot_mapping.const_data_ptr<int64_t>()[t];
    bf16* keys = data_of(kv) + slot / block_size * block_size * R + slot % block_size * 2;
    for (int64_t d = 0; d < R; d += 2) std::memcpy(keys + d * block_size, room + d, 4);
  }

  // Calls each(t, its cosines, its sines, R numbers of room) for all tokens. work: a token's, in numbers.
  template <class Each> void for_each_token(int64_t work, Each each) const {
    const int64_t P = rotated_dim(), R = key_dim();
    auto with_tables = [&](const auto* c, const auto* s) {
      at::parallel_for(0, num_tokens(), std::max<int64_t>(1, 16384 / work), [&](int64_t begin, int64_t end) {
        std::vector<bf16> room(R);
        for (int64_t t = begin; t < end; t++) each(t, c + t * P, s + t * P, room.data());
      });
    };
    if (cos.scalar_type() == at::kFloat) with_tables(cos.const_data_ptr<float>(), sin.const_data_ptr<float>());
    else with_tables(data_of(cos), data_of(sin));
  }
};

// Norms the latents, rotates their keys, and stores both.
void store_latents(
    const at::Tensor& latent, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& norm, double eps, const at::Tensor& kv,
    const at::Tensor& slot_mapping) {
  const StepLatents latents{latent, cos, sin, norm, eps, kv, slot_mapping};
  latents.check();
  latents.for_each_token(latents.key_dim(), [&](int64_t t, const auto* c, const auto* s, bf16* room) { latents.store(t, c, s, room); });
}

// q [T, N * (Q + P)] and latent [T, R], before its norm; up_key: N heads' weights in panels, Q inputs and C outputs.
// Norms the latents, rotates keys, and stores both in one layer of the pool at slot_mapping [T]. Returns queries
// [T, N, R]: mapped to the space of latents, and rotated.
at::Tensor absorb(
    const at::Tensor& q, const at::Tensor& latent, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& norm,
    double eps, const at::Tensor& up_key, const OfOutputs& up_key_scale, int64_t num_heads, const at::Tensor& kv,
    const at::Tensor& slot_mapping) {
  const StepLatents latents{latent, cos, sin, norm, eps, kv, slot_mapping};
  latents.check();
  const int64_t T = q.size(0), N = num_heads, P = latents.rotated_dim(), Q = q.size(1) / N - P, C = latents.latent_dim(), R = C + P;
  TORCH_CHECK(q.is_contiguous() && q.size(1) == N * (Q + P) && T == latents.num_tokens(), "queries: one row per token, contiguous");
  check_heads(up_key, up_key_scale, N, Q, C);
  at::Tensor out = at::empty({T, N, R}, q.options()), without_positions = at::empty({N, T, Q}, q.options());
  bf16 *to = data_of(out), *plain = data_of(without_positions);
  const bf16* from = data_of(q);
  latents.for_each_token(N * (Q + P), [&](int64_t t, const auto* c, const auto* s, bf16* room) {
    latents.store(t, c, s, room);
    for (int64_t n = 0; n < N; n++) {
      const bf16* head = from + (t * N + n) * (Q + P);
      std::memcpy(plain + (n * T + t) * Q, head, Q * sizeof(bf16));
      rotate_head(head + Q, c, s, P, P, to + (t * N + n) * R + C);
    }
  });
  multiply_heads(plain, T, N, up_key, up_key_scale, {to, N * R, R, C});
  return out;
}

// q [T, N, R], up_value: N heads' weights in panels, C inputs and V outputs -> [T, N * V]. The other arguments are those
// of `paged_attention`.
at::Tensor latent_attention(
    const at::Tensor& q, const at::Tensor& kv, const at::Tensor& block_tables, const at::Tensor& query_lens,
    const at::Tensor& context_lens, double scale, const at::Tensor& up_value, const OfOutputs& up_value_scale, int64_t value_dim) {
  const int64_t T = q.size(0), N = q.size(1), R = q.size(2), S = block_tables.size(0), block_size = kv.size(3);
  const int64_t C = 2 * Panels(up_value).pairs, V = value_dim;
  TORCH_CHECK(q.is_contiguous() && kv.is_contiguous() && block_tables.is_contiguous(), "contiguous");
  TORCH_CHECK(block_size % LANES == 0 && R % LANES == 0 && C % LANES == 0 && C <= R && R == kv.size(4), "16 must divide block size, latents and keys");
  TORCH_CHECK(scale > 0, "scale must be above 0");
  check_heads(up_value, up_value_scale, N, C, V);
  at::Tensor sums = at::empty({N, T, C}, q.options()), out = at::empty({T, N * V}, q.options());
  const int32_t *lens = query_lens.data_ptr<int32_t>(), *contexts = context_lens.data_ptr<int32_t>();
  const PoolOfLatents pool{reinterpret_cast<const uint32_t*>(data_of(kv)), block_size, R, C};
  const Attention<PoolOfLatents> attention{
      pool, data_of(q), block_tables.data_ptr<int32_t>(), N, N / heads_of_item(N, S, contexts), block_tables.size(1), 0,
      float(scale) * LOG2_E, nullptr, data_of(sums), C, T * C};
  attend(attention, S, lens, contexts);
  multiply_heads(data_of(sums), T, N, up_value, up_value_scale, {data_of(out), N * V, V, V});
  return out;
}

}  // namespace tandem
