// What a decoder layer with latent attention computes between its first product and its last (layers.h).
#pragma once

#include <ATen/record_function.h>
#include <torch/custom_class.h>

#include <optional>

#include "latent_attention.h"
#include "matmul.h"
#include "rows.h"

namespace tandem {

// Computes a part of a layer under a name for torch's profiler, which sees only one call for all layers. Without a
// profiler this costs some nanoseconds.
template <class Part> at::Tensor recorded(const char* name, Part part) {
  RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>());
  return part();
}

// What a step's layers share: see `rotate_and_store` and `paged_attention`.
struct LayersStep {
  const at::Tensor &cos, &sin, &slot_mapping, &block_tables, &query_lens, &context_lens;
};

// Attention to latents (engine/models/latent_attention.py: LatentAttention), without its first and last product.
struct LatentHeads : torch::CustomClassHolder {
  // up_query: from the normed latents of queries, if there is a norm, else from the layer's normed input. The others are
  // the arguments of `absorb` and `latent_attention`.
  LatentHeads(
      std::optional<at::Tensor> query_norm, at::Tensor up_query, OfOutputs up_query_scale, int64_t num_query_outputs, at::Tensor norm,
      double eps, at::Tensor up_key, OfOutputs up_key_scale, at::Tensor up_value, OfOutputs up_value_scale, int64_t num_heads,
      int64_t value_dim, double scale)
      : query_norm_(std::move(query_norm)), up_query_(std::move(up_query)), up_query_scale_(std::move(up_query_scale)),
        num_query_outputs_(num_query_outputs), norm_(std::move(norm)), eps_(eps), up_key_(std::move(up_key)),
        up_key_scale_(std::move(up_key_scale)), up_value_(std::move(up_value)), up_value_scale_(std::move(up_value_scale)),
        num_heads_(num_heads), value_dim_(value_dim), scale_(scale) {}

  // normed [T, D]; projected: the first product's outputs, latents of queries (if any) and [T, R] -> [T, N * V]
  at::Tensor attend(const at::Tensor& normed, const at::Tensor& projected, const at::Tensor& kv, const LayersStep& step) const {
    const int64_t num_query = query_norm_ ? query_norm_->numel() : 0;
    at::Tensor q = recorded("layer: queries", [&] {
      const at::Tensor from = query_norm_ ? add_rms_norm(projected.narrow(1, 0, num_query).contiguous(), std::nullopt, *query_norm_, eps_) : normed;
      return linear(from, up_query_, up_query_scale_, std::nullopt, num_query_outputs_);
    });
    at::Tensor absorbed = recorded("layer: absorb, KV write", [&] {
      const at::Tensor latent = projected.narrow(1, num_query, projected.size(1) - num_query);
      return absorb(q, latent, step.cos, step.sin, norm_, eps_, up_key_, up_key_scale_, num_heads_, kv, step.slot_mapping);
    });
    return recorded("layer: attention", [&] {
      return latent_attention(
          absorbed, kv, step.block_tables, step.query_lens, step.context_lens, scale_, up_value_, up_value_scale_, value_dim_);
    });
  }

 private:
  std::optional<at::Tensor> query_norm_;
  at::Tensor up_query_;
  OfOutputs up_query_scale_;
  int64_t num_query_outputs_;
  at::Tensor norm_;
  double eps_;
  at::Tensor up_key_;
  OfOutputs up_key_scale_;
  at::Tensor up_value_;
  OfOutputs up_value_scale_;
  int64_t num_heads_, value_dim_;
  double scale_;
};

}  // namespace tandem
