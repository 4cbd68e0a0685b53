// The operations on single rows between products: RMS norm with the residual addition before it, and rotary positions
// with the write into the KV pool. Rounding is as in the same steps in PyTorch, except for rotary positions, which are
// rounded once instead of three times.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <optional>

#include "vectors.h"

namespace tandem {

constexpr int64_t MOST_HEAD_DIM = 512;

// 1 / rms(x), one row
inline float norm_scale(const bf16* x, float eps, int64_t D) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < D; i++) {
    float f = to_float(x[i]);
    sum += f * f;
  }
  return 1.0f / std::sqrt(sum / float(D) + eps);
}

// out = weight * bf16(x / rms(x)), one row
inline void norm_row(const bf16* x, const bf16* weight, float eps, int64_t D, bf16* out) {
  float scale = norm_scale(x, eps, D);
#pragma omp simd
  for (int64_t i = 0; i < D; i++) out[i] = to_bf16(to_float(weight[i]) * to_float(to_bf16(to_float(x[i]) * scale)));
}

// The same with a weight in float32: out is rounded only once.
inline void norm_row(const bf16* x, const float* weight, float eps, int64_t D, bf16* out) {
  float scale = norm_scale(x, eps, D);
#pragma omp simd
  for (int64_t i = 0; i < D; i++) out[i] = to_bf16(weight[i] * (to_float(x[i]) * scale));
}

// x += delta (if given), in place; returns the norm of x. x [T, D] contiguous.
at::Tensor add_rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& delta, const at::Tensor& weight, double eps) {
  int64_t D = x.size(-1), T = x.numel() / D;
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && weight.numel() == D, "x [.., D] and weight [D], contiguous");
  TORCH_CHECK(!delta || (delta->is_contiguous() && delta->numel() == x.numel()), "delta must be like x");
  at::Tensor out = at::empty_like(x);
  bf16 *xp = data_of(x), *op = data_of(out), *dp = delta ? data_of(*delta) : nullptr;
  const bool is_float = weight.scalar_type() == at::kFloat;
  const float* float_weight = is_float ? weight.const_data_ptr<float>() : nullptr;
  const bf16* wp = is_float ? nullptr : data_of(weight);
  at::parallel_for(0, T, std::max<int64_t>(1, 16384 / D), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      bf16* row = xp + t * D;
      if (dp) {
        const bf16* more = dp + t * D;
#pragma omp simd
        for (int64_t i = 0; i < D; i++) row[i] = to_bf16(to_float(row[i]) + to_float(more[i]));
      }
      if (is_float) norm_row(row, float_weight, float(eps), D, op + t * D);
      else norm_row(row, wp, float(eps), D, op + t * D);
    }
  });
  return out;
}

// Rotates the first R of a head's H numbers: out = x * cos + rotate_half(x) * sin. The sign of rotate_half is in the sin
// table, which is in bfloat16 or float32.
template <typename Table>
void rotate_head(const bf16* x, const Table* cos, const Table* sin, int64_t R, int64_t H, bf16* out) {
  int64_t half = R / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    float low = to_float(x[i]), high = to_float(x[i + half]);
    out[i] = to_bf16(low * to_float(cos[i]) + high * to_float(sin[i]));
    out[i + half] = to_bf16(high * to_float(cos[i + half]) + low * to_float(sin[i + half]));
  }
  if (R < H) std::memcpy(out + R, x + R, (H - R) * sizeof(bf16));
}

// qkv [T, (N + 2K) * H]. Norms (if there are weights) and rotates queries and keys, and stores keys and values in one
// layer of the pool at slot_mapping [T]. Returns the queries [T, N, H].
at::Tensor rotate_and_store(
    const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const std::optional<at::Tensor>& q_norm,
    const std::optional<at::Tensor>& k_norm, double eps, const at::Tensor& kv, const at::Tensor& slot_mapping) {
  int64_t K = kv.size(2), block_size = kv.size(3), H = kv.size(4), T = qkv.size(0);
  int64_t X = qkv.size(1) / H, N = X - 2 * K, R = cos.size(-1);
  TORCH_CHECK(qkv.is_contiguous() && cos.is_contiguous() && sin.is_contiguous() && kv.is_contiguous(), "contiguous");
  TORCH_CHECK(cos.numel() == T * R && sin.numel() == T * R && slot_mapping.numel() == T, "one row per token");
  TORCH_CHECK(R % 2 == 0 && R <= H, "an even number of a head's numbers are rotated");
  TORCH_CHECK(block_size % LANES == 0 && H % LANES == 0 && H <= MOST_HEAD_DIM, "16 must divide block and head size");
  at::Tensor out = at::empty({T, N, H}, qkv.options());
  const bf16 *in = data_of(qkv), *qw = q_norm ? data_of(*q_norm) : nullptr, *kw = k_norm ? data_of(*k_norm) : nullptr;
  bf16 *op = data_of(out), *pool = data_of(kv);
  const int64_t* slots = slot_mapping.data_ptr<int64_t>();
  int64_t plane = block_size * H;
  auto all_rows = [&](const auto* cp, const auto* sp) {
    at::parallel_for(0, T, std::max<int64_t>(1, 16384 / (X * H)), [&](int64_t begin, int64_t end) {
      bf16 normed[MOST_HEAD_DIM], rotated[MOST_HEAD_DIM];
      for (int64_t t = begin; t < end; t++) {
        const bf16* row = in + t * X * H;
        const auto *c = cp + t * R, *s = sp + t * R;
        for (int64_t n = 0; n < N; n++) {
          const bf16* head = row + n * H;
          if (qw) norm_row(head, qw, float(eps), H, normed), head = normed;
          rotate_head(head, c, s, R, H, op + (t * N + n) * H);
        }
        int64_t block = slots[t] / block_size, slot = slots[t] % block_size;
        for (int64_t k = 0; k < K; k++) {
          const bf16* head = row + (N + k) * H;
          if (kw) norm_row(head, kw, float(eps), H, normed), head = normed;
          rotate_head(head, c, s, R, H, rotated);
          bf16* keys = pool + ((block * 2) * K + k) * plane + slot * 2;
          for (int64_t d = 0; d < H; d += 2) std::memcpy(keys + d * block_size, rotated + d, 4);
          const bf16* v = row + (N + K + k) * H;
          bf16* values = pool + ((block * 2 + 1) * K + k) * plane + (slot / 2) * 2 * H + (slot & 1);
          for (int64_t d = 0; d < H; d++) values[2 * d] = v[d];
        }
      }
    });
  };
  if (cos.scalar_type() == at::kFloat) all_rows(cos.const_data_ptr<float>(), sin.const_data_ptr<float>());
  else all_rows(data_of(cos), data_of(sin));
  return out;
}

}  // namespace tandem
