// Layers of gated delta rules: the rule itself.
#pragma once

#include "recurrent.h"

namespace tandem {

// What a, b [T, N] say of each token and head: decay = exp(-rate softplus(a + bias)) and beta = sigmoid(b), which is
// rounded to bfloat16: [2, T, N] in float32. rate and bias [N] in float32, all contiguous. Number by number: where torch
// computes registers of numbers at once, the last ones have other last bits, and which are last depends on the step.
at::Tensor delta_gates(const at::Tensor& a, const at::Tensor& b, const at::Tensor& rate, const at::Tensor& bias) {
  int64_t T = a.size(0), N = a.size(1);
  TORCH_CHECK(a.is_contiguous() && b.is_contiguous() && b.sizes() == a.sizes(), "a and b [T, N], contiguous");
  TORCH_CHECK(rate.numel() == N && rate.is_contiguous() && rate.scalar_type() == at::kFloat, "rate");
  TORCH_CHECK(bias.numel() == N && bias.is_contiguous() && bias.scalar_type() == at::kFloat, "bias");
  at::Tensor out = at::empty({2, T, N}, rate.options());
  const bf16 *ap = data_of(a), *bp = data_of(b);
  const float *rp = rate.const_data_ptr<float>(), *sp = bias.const_data_ptr<float>();
  float *decay = out.data_ptr<float>(), *beta = decay + T * N;
  at::parallel_for(0, T * N, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      float x = to_float(ap[i]) + sp[i % N];
      float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
      decay[i] = std::exp(-rp[i % N] * softplus);
      beta[i] = to_float(to_bf16(1.0f / (1.0f + std::exp(-to_float(bp[i])))));
    }
  });
  return out;
}

constexpr int64_t COLUMNS = 32;  // of a matrix, in an item of the rule: its part then stays in the first cache
constexpr int64_t MOST_KEY_DIM = 256;

// Columns of one sequence's matrix S of one head: for each token, with its query, key and value,
//   S = decay * S;  S += key (beta * (value - key S));  y = query S.
class DeltaColumns {
 public:
  DeltaColumns(float* matrix, int64_t K, int64_t V, bool is_new) : matrix(matrix), K(K), V(V) {
    for (int64_t k = 0; k < K; k++) {
      if (is_new) std::memset(part[k], 0, sizeof(part[k]));
      else std::memcpy(part[k], matrix + k * V, sizeof(part[k]));
    }
  }

  void step(const float* q, const float* key, const bf16* value, float decay, float beta, bf16* y) {
    // Several sums at once, since an addition waits for the one before.
    Sums sums[AT_ONCE][REGISTERS] = {};
    for (int64_t k = 0; k < K; k += AT_ONCE)
      for (int u = 0; u < AT_ONCE; u++)
        for (int r = 0; r < REGISTERS; r++) sums[u][r] += load<Sums>(part[k + u] + r * REGISTER) * key[k + u];
    Sums missing[REGISTERS], out[AT_ONCE][REGISTERS] = {};
    for (int r = 0; r < REGISTERS; r++) {
      for (int u = 1; u < AT_ONCE; u++) sums[0][r] += sums[u][r];
      missing[r] = (load_floats(value + r * REGISTER) - sums[0][r] * decay) * beta;
    }
    for (int64_t k = 0; k < K; k += AT_ONCE)
      for (int u = 0; u < AT_ONCE; u++)
        for (int r = 0; r < REGISTERS; r++) {
          float* at = part[k + u] + r * REGISTER;
          Sums changed = load<Sums>(at) * decay + missing[r] * key[k + u];
          store(at, changed);
          out[u][r] += changed * q[k + u];
        }
    for (int r = 0; r < REGISTERS; r++) {
      for (int u = 1; u < AT_ONCE; u++) out[0][r] += out[u][r];
      store_bf16(y + r * REGISTER, out[0][r]);
    }
  }

  void keep() const {
    for (int64_t k = 0; k < K; k++) std::memcpy(matrix + k * V, part[k], sizeof(part[k]));
  }

 private:
  static constexpr int REGISTERS = COLUMNS / REGISTER, AT_ONCE = REGISTER == 16 ? 4 : 2;
  float* matrix;
  int64_t K, V;
  alignas(64) float part[MOST_KEY_DIM][COLUMNS];
};

// x / |x| * factor, in float32. K numbers.
inline void of_length_one(const bf16* x, int64_t K, float factor, float* out) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < K; i++) sum += to_float(x[i]) * to_float(x[i]);
  float scale = factor / std::sqrt(sum + 1e-6f);
#pragma omp simd
  for (int64_t i = 0; i < K; i++) out[i] = to_float(x[i]) * scale;
}

// The gated delta rule: [T, N, V]. qkv [T, C]: G queries, G keys of K numbers each, N values of V; decay and beta [T, N]
// in float32, all contiguous; matrices [R, N, K, V] in float32, of which each sequence's row is changed.
at::Tensor delta_rule(
    const at::Tensor& qkv, const at::Tensor& decay, const at::Tensor& beta, const at::Tensor& matrices,
    const at::Tensor& firsts, const at::Tensor& lengths, const at::Tensor& slots, const at::Tensor& is_new) {
  int64_t T = qkv.size(0), C = qkv.size(1), N = matrices.size(1), K = matrices.size(2), V = matrices.size(3);
  int64_t G = (C - N * V) / 2 / K;
  Sequences seqs(firsts, lengths, slots, is_new);
  seqs.check(T, matrices.size(0));
  TORCH_CHECK(G > 0 && C == 2 * G * K + N * V && N % G == 0, C, " channels for ", N, " heads");
  TORCH_CHECK(V % COLUMNS == 0 && K % 4 == 0 && K <= MOST_KEY_DIM, "heads of ", K, " and ", V);
  TORCH_CHECK(matrices.scalar_type() == at::kFloat && matrices[0].is_contiguous(), "matrices [R, N, K, V] in float32");
  TORCH_CHECK(decay.numel() == T * N && decay.is_contiguous() && decay.scalar_type() == at::kFloat, "decay");
  TORCH_CHECK(beta.numel() == T * N && beta.is_contiguous() && beta.scalar_type() == at::kFloat, "beta");
  TORCH_CHECK(qkv.is_contiguous(), "qkv [T, C], contiguous");
  at::Tensor out = at::empty({T, N, V}, qkv.options());
  at::Tensor normed = at::empty({T, 2 * G * K}, qkv.options().dtype(at::kFloat));
  const bf16* xp = data_of(qkv);
  const float *dp = decay.const_data_ptr<float>(), *bp = beta.const_data_ptr<float>();
  float *np = normed.data_ptr<float>(), *mp = matrices.data_ptr<float>();
  bf16* op = data_of(out);
  at::parallel_for(0, T * 2 * G, std::max<int64_t>(1, 8192 / K), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t t = i / (2 * G), head = i % (2 * G);
      float factor = head < G ? 1.0f / std::sqrt(float(K)) : 1.0f;
      of_length_one(xp + t * C + head * K, K, factor, np + (t * 2 * G + head) * K);
    }
  });
  int64_t parts = V / COLUMNS, row_stride = matrices.stride(0);
  for_each_item(seqs.num_seqs * N * parts, [&](int64_t item) {
    int64_t s = item / (N * parts), n = item / parts % N, first_column = item % parts * COLUMNS, g = n / (N / G);
    DeltaColumns columns(mp + seqs.slots[s] * row_stride + n * K * V + first_column, K, V, seqs.is_new[s]);
    for (int64_t t = seqs.firsts[s]; t < seqs.firsts[s] + seqs.lengths[s]; t++) {
      const float* q = np + (t * 2 * G + g) * K;
      const bf16* value = xp + t * C + 2 * G * K + n * V + first_column;
      columns.step(q, q + G * K, value, dp[t * N + n], bp[t * N + n], op + (t * N + n) * V + first_column);
    }
    columns.keep();
  });
  return out;
}

}  // namespace tandem
