// Mamba-2 layers: the scan.
#pragma once

#include "recurrent.h"

namespace tandem {

// What dt [T, N] says of each token and head: how long a step it takes, softplus(dt + bias) within limits, and
// decay = exp(-rate step): [2, T, N] in float32, decay first. rate and bias [N] in float32, all contiguous. Number by
// number: where torch computes registers of numbers at once, the last ones have other last bits.
at::Tensor scan_steps(const at::Tensor& dt, const at::Tensor& rate, const at::Tensor& bias, double least, double most) {
  int64_t T = dt.size(0), N = dt.size(1);
  TORCH_CHECK(dt.is_contiguous(), "dt [T, N], contiguous");
  TORCH_CHECK(rate.numel() == N && rate.is_contiguous() && rate.scalar_type() == at::kFloat, "rate");
  TORCH_CHECK(bias.numel() == N && bias.is_contiguous() && bias.scalar_type() == at::kFloat, "bias");
  at::Tensor out = at::empty({2, T, N}, rate.options());
  const bf16* dp = data_of(dt);
  const float *rp = rate.const_data_ptr<float>(), *sp = bias.const_data_ptr<float>();
  float *decay = out.data_ptr<float>(), *steps = decay + T * N, low = float(least), high = float(most);
  at::parallel_for(0, T * N, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      float x = to_float(dp[i]) + sp[i % N];
      float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
      steps[i] = softplus < low ? low : softplus > high ? high : softplus;  // a NaN stays one
      decay[i] = std::exp(-rp[i % N] * steps[i]);
    }
  });
  return out;
}

constexpr int64_t SCAN_COLUMNS = 16;
constexpr int64_t MOST_STATE_DIM = 256;

// Columns of one sequence's matrix S of one head: for each token, with its query, key and value,
//   S = decay * S + key (step * value);  y = query S + skip * value.
class ScanColumns {
 public:
  ScanColumns(float* matrix, int64_t K, int64_t V, bool is_new) : matrix(matrix), K(K), V(V) {
    for (int64_t k = 0; k < K; k++) {
      if (is_new) std::memset(part[k], 0, sizeof(part[k]));
      else std::memcpy(part[k], matrix + k * V, sizeof(part[k]));
    }
  }

  void step(const float* query, const float* key, const bf16* value, float decay, float step, float skip, bf16* y) {
    for (int r = 0; r < REGISTERS; r++) {
      Sums x = load_floats(value + r * REGISTER), added = x * step;
      Sums out[AT_ONCE] = {};  // several sums at once, since an addition waits for the one before
      for (int64_t k = 0; k < K; k += AT_ONCE)
        for (int u = 0; u < AT_ONCE; u++) {
          float* at = part[k + u] + r * REGISTER;
          Sums changed = load<Sums>(at) * decay + added * key[k + u];
          store(at, changed);
          out[u] += changed * query[k + u];
        }
      for (int u = 1; u < AT_ONCE; u++) out[0] += out[u];
      store_bf16(y + r * REGISTER, out[0] + x * skip);
    }
  }

  void keep() const {
    for (int64_t k = 0; k < K; k++) std::memcpy(matrix + k * V, part[k], sizeof(part[k]));
  }

 private:
  static constexpr int REGISTERS = SCAN_COLUMNS / REGISTER, AT_ONCE = 4;
  float* matrix;
  int64_t K, V;
  alignas(64) float part[MOST_STATE_DIM][SCAN_COLUMNS];
};

// The scan: [T, N, V]. x [T, C]: N values of V numbers each, G keys and G queries of K; decay and steps [T, N] and skip
// [N] in float32, all contiguous; matrices [R, N, K, V] in float32, of which each sequence's row is changed.
at::Tensor scan(
    const at::Tensor& x, const at::Tensor& decay, const at::Tensor& steps, const at::Tensor& skip,
    const at::Tensor& matrices, const at::Tensor& firsts, const at::Tensor& lengths, const at::Tensor& slots,
    const at::Tensor& is_new) {
  int64_t T = x.size(0), C = x.size(1), N = matrices.size(1), K = matrices.size(2), V = matrices.size(3);
  int64_t G = (C - N * V) / 2 / K;
  Sequences seqs(firsts, lengths, slots, is_new);
  seqs.check(T, matrices.size(0));
  TORCH_CHECK(G > 0 && C == 2 * G * K + N * V && N % G == 0, C, " channels for ", N, " heads");
  TORCH_CHECK(V % SCAN_COLUMNS == 0 && K % 4 == 0 && K <= MOST_STATE_DIM, "heads of ", K, " and ", V);
  TORCH_CHECK(matrices.scalar_type() == at::kFloat && matrices[0].is_contiguous(), "matrices [R, N, K, V] in float32");
  TORCH_CHECK(decay.numel() == T * N && decay.is_contiguous() && decay.scalar_type() == at::kFloat, "decay");
  TORCH_CHECK(steps.numel() == T * N && steps.is_contiguous() && steps.scalar_type() == at::kFloat, "steps");
  TORCH_CHECK(skip.numel() == N && skip.is_contiguous() && skip.scalar_type() == at::kFloat, "skip");
  TORCH_CHECK(x.is_contiguous(), "x [T, C], contiguous");
  at::Tensor out = at::empty({T, N, V}, x.options());
  at::Tensor widened = at::empty({T, 2 * G * K}, x.options().dtype(at::kFloat));  // keys and queries
  const bf16* xp = data_of(x);
  const float *dp = decay.const_data_ptr<float>(), *sp = steps.const_data_ptr<float>(), *kp = skip.const_data_ptr<float>();
  float *wp = widened.data_ptr<float>(), *mp = matrices.data_ptr<float>();
  bf16* op = data_of(out);
  at::parallel_for(0, T, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      for (int64_t i = 0; i < 2 * G * K; i++) wp[t * 2 * G * K + i] = to_float(xp[t * C + N * V + i]);
  });
  int64_t parts = V / SCAN_COLUMNS, row_stride = matrices.stride(0);
  for_each_item(seqs.num_seqs * N * parts, [&](int64_t item) {
    int64_t s = item / (N * parts), n = item / parts % N, first_column = item % parts * SCAN_COLUMNS, g = n / (N / G);
    ScanColumns columns(mp + seqs.slots[s] * row_stride + n * K * V + first_column, K, V, seqs.is_new[s]);
    for (int64_t t = seqs.firsts[s]; t < seqs.firsts[s] + seqs.lengths[s]; t++) {
      const float* key = wp + (t * 2 * G + g) * K;
      const bf16* value = xp + t * C + n * V + first_column;
      bf16* y = op + (t * N + n) * V + first_column;
      columns.step(key + G * K, key, value, dp[t * N + n], sp[t * N + n], kp[n], y);
    }
    columns.keep();
  });
  return out;
}

}  // namespace tandem
