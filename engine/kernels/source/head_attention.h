// Attention to keys and values of heads.
#pragma once

#include <ATen/ops/empty.h>

#include <optional>

#include "attention.h"

namespace tandem {

// The keys and values of heads in one layer, [block, 2, head, ...], in the pool's layout (engine/kv_cache.py:
// PAIRED_KV_ORDER):
//   keys    [dim / 2, slot, 2]   one vector holds one dim pair of 16 positions: scores need no sums across lanes
//   values  [slot / 2, dim, 2]   one vector holds one slot pair of 16 dims: nor does the weighted sum
struct PoolOfHeads {
  const uint32_t* data;  // in pairs
  int64_t num_heads, block_size, key_dim, value_dim;

  // Between the keys of two heads, and their values.
  int64_t pairs_of_head() const { return block_size * key_dim / 2; }

  // The keys of a block and head from `slot` on.
  const uint32_t* keys(int64_t block, int64_t head, int64_t slot) const {
    return data + (2 * block * num_heads + head) * pairs_of_head() + slot;
  }

  // The values of 16 slots. `room`: for those that are not in the pool as they are.
  const uint32_t* values(int64_t block, int64_t head, int64_t slot, uint32_t*) const {
    return data + ((2 * block + 1) * num_heads + head) * pairs_of_head() + slot / 2 * value_dim;
  }
};

// q [T, N, H] -> [T, N * H]. Sequence i has query_lens[i] tokens to compute, the last of its context_lens[i] tokens;
// its blocks are block_tables[i]. These three tensors are int32. window > 0: each token attends to the last `window`
// keys only, its own included. sinks [N] float32.
at::Tensor paged_attention(
    const at::Tensor& q, const at::Tensor& kv, const at::Tensor& block_tables, const at::Tensor& query_lens,
    const at::Tensor& context_lens, double scale, int64_t window, const std::optional<at::Tensor>& sinks) {
  int64_t T = q.size(0), N = q.size(1), H = q.size(2), K = kv.size(2), block_size = kv.size(3), G = N / K;
  TORCH_CHECK(q.is_contiguous() && kv.is_contiguous() && block_tables.is_contiguous(), "contiguous");
  TORCH_CHECK(block_size % LANES == 0 && H % LANES == 0 && H == kv.size(4), "16 must divide block and head size");
  TORCH_CHECK(N % K == 0 && G <= MAX_ROWS, "query heads must share key heads evenly");
  TORCH_CHECK(scale > 0, "scale must be above 0");
  TORCH_CHECK(!sinks || (sinks->is_contiguous() && sinks->numel() == N), "a sink for each query head");
  at::Tensor out = at::empty({T, N * H}, q.options());
  const PoolOfHeads pool{reinterpret_cast<const uint32_t*>(data_of(kv)), K, block_size, H, H};
  const Attention<PoolOfHeads> attention{
      pool, data_of(q), block_tables.data_ptr<int32_t>(), N, K, block_tables.size(1), window, float(scale) * LOG2_E,
      sinks ? sinks->data_ptr<float>() : nullptr, data_of(out), N * H, H};
  attend(attention, block_tables.size(0), query_lens.data_ptr<int32_t>(), context_lens.data_ptr<int32_t>());
  return out;
}

}  // namespace tandem
