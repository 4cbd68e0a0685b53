// The layers of a decoder, one call for each or for all of them: with few tokens, the operations between products take
// only microseconds, and so does every call from Python.
#pragma once

#include <ATen/ops/add.h>
#include <torch/custom_class.h>

#include <vector>

#include "head_attention.h"
#include "latent_layer.h"
#include "matmul.h"
#include "mixture.h"
#include "rows.h"

namespace tandem {

// One decoder layer (engine/models/layer.py: DecoderLayer).
struct DecoderLayer : torch::CustomClassHolder {
  struct Product {
    at::Tensor weight;
    OfOutputs scale, bias;
    int64_t num_outputs;
    c10::intrusive_ptr<AddedProduct> added;  // what adapters add; null: no adapter changes this product
  };
  Product first, output, gated, down;  // first: q, k and v, or what latent attention begins with
  at::Tensor input_norm, post_attention_norm;
  std::optional<at::Tensor> q_norm, k_norm;
  double eps, scale;
  int64_t window;

  c10::intrusive_ptr<LatentHeads> latents;  // null: heads have keys and values
  c10::intrusive_ptr<Mixture> mixture;      // gated and down, if there are any, are then the shared experts

  // Weights in panels, scales, biases and numbers of outputs, of these products in this order: first, output, gate with
  // up, down; of the first two alone if the layer has a mixture without shared experts.
  DecoderLayer(
      const std::vector<at::Tensor>& weights, const std::vector<OfOutputs>& scales, const std::vector<OfOutputs>& biases,
      const std::vector<int64_t>& num_outputs, at::Tensor input_norm, at::Tensor post_attention_norm,
      std::optional<at::Tensor> q_norm, std::optional<at::Tensor> k_norm, double eps, double scale, int64_t window)
      : input_norm(std::move(input_norm)), post_attention_norm(std::move(post_attention_norm)), q_norm(std::move(q_norm)),
        k_norm(std::move(k_norm)), eps(eps), scale(scale), window(window) {
    TORCH_CHECK(weights.size() == 2 || weights.size() == 4, "a layer has two or four products");
    Product* products[] = {&first, &output, &gated, &down};
    for (size_t i = 0; i < weights.size(); i++)
      *products[i] = {weights[i], scales.at(i), biases.at(i), num_outputs.at(i), nullptr};
  }

  void mix(const c10::intrusive_ptr<Mixture>& given) { mixture = given; }

  void attend_to_latents(const c10::intrusive_ptr<LatentHeads>& given) { latents = given; }

  // Sets what adapters add to one of the four products, numbered in the order above.
  void adapt(int64_t product, const c10::intrusive_ptr<AddedProduct>& added) {
    Product* products[] = {&first, &output, &gated, &down};
    TORCH_CHECK(product >= 0 && product < 4 && products[product]->weight.defined(), "product: there is no ", product);
    TORCH_CHECK(added->num_inputs == 2 * Panels(products[product]->weight).pairs, "what is added must have the product's inputs");
    products[product]->added = added;
  }

  // x [T, D] becomes x + delta + the output of attention. Returns the output of the feed-forward network, which the
  // caller still has to add. adapter_ids [T] int32: the adapter of each row, 0 for none; null if no row has one.
  at::Tensor forward(
      const at::Tensor& x, const std::optional<at::Tensor>& delta, const at::Tensor& kv, const at::Tensor& cos,
      const at::Tensor& sin, const at::Tensor& slot_mapping, const at::Tensor& block_tables,
      const at::Tensor& query_lens, const at::Tensor& context_lens, const std::optional<at::Tensor>& adapter_ids) const {
    const auto rows = rows_of(adapter_ids);
    const LayersStep step{cos, sin, slot_mapping, block_tables, query_lens, context_lens};
    return run(x, delta, kv, step, rows ? &*rows : nullptr, nullptr, nullptr);
  }

  // The products prefetch `own`, the KV of this layer's attention, and `next`, the KV of the next layer's.
  at::Tensor run(
      const at::Tensor& x, const std::optional<at::Tensor>& delta, const at::Tensor& kv, const LayersStep& step,
      const AdapterRows* rows, ReadAhead* own, ReadAhead* next) const {
    at::Tensor normed = recorded("layer: norm", [&] { return add_rms_norm(x, delta, input_norm, eps); });
    at::Tensor projected = recorded("layer: qkv", [&] { return multiplied(first, normed, own, rows); });
    at::Tensor attended = latents ? latents->attend(normed, projected, kv, step) : attend(projected, kv, step);
    at::Tensor projected_back = recorded("layer: output", [&] { return multiplied(output, attended, next, rows); });
    at::Tensor h = recorded("layer: norm", [&] { return add_rms_norm(x, projected_back, post_attention_norm, eps); });
    at::Tensor chosen;
    if (mixture) chosen = recorded("layer: experts", [&] { return mixture->forward(h); });
    if (!gated.weight.defined()) return chosen;
    at::Tensor active = recorded("layer: gate, up", [&] {
      return gated_linear_ahead(
          h, gated.weight, gated.scale, gated.bias, gated.num_outputs, false, next, gated.added.get(), rows);
    });
    at::Tensor out = recorded("layer: down", [&] { return multiplied(down, active, next, rows); });
    return mixture ? chosen.add_(out) : out;
  }

  at::Tensor attend(const at::Tensor& qkv, const at::Tensor& kv, const LayersStep& step) const {
    at::Tensor q = recorded("layer: rotary, KV write", [&] {
      return rotate_and_store(qkv, step.cos, step.sin, q_norm, k_norm, eps, kv, step.slot_mapping);
    });
    return recorded("layer: attention", [&] {
      return paged_attention(q, kv, step.block_tables, step.query_lens, step.context_lens, scale, window, std::nullopt);
    });
  }

  static at::Tensor multiplied(const Product& p, const at::Tensor& x, ReadAhead* ahead, const AdapterRows* rows) {
    return linear_ahead(x, p.weight, p.scale, p.bias, p.num_outputs, ahead, p.added.get(), rows);
  }

  static std::optional<AdapterRows> rows_of(const std::optional<at::Tensor>& adapter_ids) {
    return adapter_ids ? std::optional<AdapterRows>(*adapter_ids) : std::nullopt;
  }
};

// All layers as one call.
struct DecoderLayers : torch::CustomClassHolder {
  std::vector<c10::intrusive_ptr<DecoderLayer>> layers;

  void add(const c10::intrusive_ptr<DecoderLayer>& layer) { layers.push_back(layer); }

  // x [T, D] is overwritten; returns the hidden state after all layers. kv_pool [layer, block, ...]. The hidden states
  // before `feature_layers` are written to `features`, [T, number of them * D], side by side.
  at::Tensor forward(
      const at::Tensor& x, const at::Tensor& kv_pool, const at::Tensor& cos, const at::Tensor& sin,
      const at::Tensor& slot_mapping, const at::Tensor& block_tables, const at::Tensor& query_lens,
      const at::Tensor& context_lens, const std::optional<at::Tensor>& adapter_ids,
      const std::optional<at::Tensor>& features, const std::vector<int64_t>& feature_layers) const {
    const auto rows = DecoderLayer::rows_of(adapter_ids);
    const LayersStep step{cos, sin, slot_mapping, block_tables, query_lens, context_lens};
    std::optional<at::Tensor> delta;
    std::vector<ReadAhead> kv(layers.size() + 1);  // the last one stays empty
    const auto note_features = [&](size_t layer) {
      for (size_t place = 0; place < feature_layers.size(); place++) {
        if (feature_layers[place] != int64_t(layer)) continue;
        at::Tensor out = features->narrow(1, int64_t(place) * x.size(1), x.size(1));
        delta ? at::add_out(out, x, *delta) : out.copy_(x);
      }
    };
    for (size_t i = 0; i < layers.size(); i++) {
      note_features(i);
      // Products by tiles do not prefetch KV.
      if (i == 0 && !has_tiles()) kv[i].pieces = kv_pieces(kv_pool.select(0, 0), block_tables, context_lens);
      if (i + 1 < layers.size() && !has_tiles())
        kv[i + 1].pieces = kv_pieces(kv_pool.select(0, int64_t(i + 1)), block_tables, context_lens);
      delta = layers[i]->run(x, delta, kv_pool.select(0, int64_t(i)), step, rows ? &*rows : nullptr, &kv[i], &kv[i + 1]);
    }
    note_features(layers.size());
    return delta ? at::add(x, *delta) : x;
  }

  // The KV of all sequences in one layer, which its attention will read.
  static std::vector<const char*> kv_pieces(const at::Tensor& kv, const at::Tensor& block_tables, const at::Tensor& context_lens) {
    const char* begin = reinterpret_cast<const char*>(data_of(kv));
    int64_t block_size = kv.size(3), block_bytes = kv.stride(0) * int64_t(sizeof(bf16)), max_blocks = block_tables.size(1);
    const int32_t *tables = block_tables.data_ptr<int32_t>(), *contexts = context_lens.data_ptr<int32_t>();
    std::vector<const char*> pieces;
    for (int64_t seq = 0; seq < block_tables.size(0); seq++)
      for (int64_t i = 0; i * block_size < contexts[seq]; i++)
        for (int64_t at = 0; at < block_bytes; at += ReadAhead::PIECE)
          pieces.push_back(begin + tables[seq * max_blocks + i] * block_bytes + at);
    return pieces;
  }
};

}  // namespace tandem
