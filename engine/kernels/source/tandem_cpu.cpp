// The bfloat16 operations for which PyTorch has no fused CPU version, as torch.ops.tandem_cpu.* and
// torch.classes.tandem_cpu.*; compiled by engine/kernels/build.py for the machine it runs on. One source for all
// machines.
//
//   vectors.h  <-  huge_pages.h  <-  panels.h  <-  product_pairs.h, product_tiles.h  <-  matmul.h  <-  layers.h, experts.h  <-  this file
//              <-  adapters.h                                                       <-
//              <-  rows.h, attention.h                                                          <-
//              <-  filters.h  <-  sampling.h; recurrent.h  <-  delta.h, scan.h                                <-
//   attention_pairs.h, attention_tiles.h  <-  attention_rows.h  <-  attention.h  <-  head_attention.h, latent_attention.h
//   tiles.h  <-  product_tiles.h, attention_tiles.h
//   read_ahead.h  <-  product_pairs.h, layers.h; huge_pages.h  <-  int4.h, mxfp4.h  <-  panels.h

#include <torch/library.h>

#include "adapters.h"
#include "delta.h"
#include "experts.h"
#include "head_attention.h"
#include "latent_attention.h"
#include "layers.h"
#include "matmul.h"
#include "rows.h"
#include "sampling.h"
#include "scan.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace tandem {

// Keeps freed memory in the process. Otherwise the kernel maps, clears and unmaps the large tensors of every step,
// which takes a third of the time of a long prompt. Only for glibc; elsewhere it does nothing.
void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
}

// Must be increased with every change that alters the bits of a sum or a softmax.
constexpr int ARITHMETIC_VERSION = 3;

// How products and attention add up on this machine: two machines with different values compute different bits.
std::string arithmetic() {
#if defined(__AVX512BF16__)
  const std::string by_vectors = "pairs";
#else
  // "bytes": so are weights in 8 and 4 bits multiplied (product_quads.h).
  const std::string by_vectors = std::string(TANDEM_QUADS ? "bytes and " : "") + "floats" + std::to_string(REGISTER);
#endif
  return (has_tiles() ? "tiles" : by_vectors) + " (version " + std::to_string(ARITHMETIC_VERSION) + ")";
}

}  // namespace tandem

using namespace tandem;

TORCH_LIBRARY(tandem_cpu, m) {
  using Tensors = std::vector<at::Tensor>;
  using EachOfOutputs = std::vector<OfOutputs>;
  m.class_<AddedProduct>("AddedProduct")
      .def(torch::init<int64_t, int64_t>())
      .def("add", &AddedProduct::add)
      .def("remove", &AddedProduct::remove)
      .def("linear", &adapted_linear)
      .def("gated_linear", &adapted_gated_linear);
  m.class_<Experts>("Experts")
      .def(torch::init<int64_t, int64_t, const std::string&, double, double>())
      .def("add", &Experts::add)
      .def("num_bytes", &Experts::num_bytes)
      .def("forward", &Experts::forward)
      .def(
          "of_chosen",
          static_cast<at::Tensor (Experts::*)(const at::Tensor&, const at::Tensor&, const at::Tensor&) const>(&Experts::of_chosen));
  m.class_<Mixture>("Mixture")
      .def(torch::init<
           at::Tensor, int64_t, int64_t, int64_t, int64_t, bool, double, std::optional<at::Tensor>, c10::intrusive_ptr<Experts>>())
      .def("forward", &Mixture::forward);
  m.class_<LatentHeads>("LatentHeads")
      .def(torch::init<
           std::optional<at::Tensor>, at::Tensor, OfOutputs, int64_t, at::Tensor, double, at::Tensor, OfOutputs, at::Tensor, OfOutputs,
           int64_t, int64_t, double>());
  m.class_<DecoderLayer>("DecoderLayer")
      .def(torch::init<
           const Tensors&, const EachOfOutputs&, const EachOfOutputs&, const std::vector<int64_t>&, at::Tensor, at::Tensor, std::optional<at::Tensor>,
           std::optional<at::Tensor>, double, double, int64_t>())
      .def("adapt", &DecoderLayer::adapt)
      .def("mix", &DecoderLayer::mix)
      .def("attend_to_latents", &DecoderLayer::attend_to_latents)
      .def("forward", &DecoderLayer::forward);
  m.class_<DecoderLayers>("DecoderLayers")
      .def(torch::init<>())
      .def("add", &DecoderLayers::add)
      .def("forward", &DecoderLayers::forward);
  m.def("pack_weight(Tensor weight) -> Tensor", &pack_weight);
  m.def("pack_int4(Tensor packed, Tensor scale, Tensor offset) -> Tensor", &pack_int4);
  m.def("pack_mxfp4(Tensor pairs, Tensor exponents) -> Tensor", &pack_mxfp4);
  m.def("linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, int num_outputs) -> Tensor", &linear);
  m.def("linear_float(Tensor x, Tensor weight, Tensor? scale, int num_outputs) -> Tensor", &linear_float);
  m.def(
      "gated_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, int num_outputs, bool is_gelu=False) -> Tensor",
      &gated_linear);
  m.def("add_rms_norm(Tensor(a!) x, Tensor? delta, Tensor weight, float eps) -> Tensor", &add_rms_norm);
  m.def(
      "rotate_and_store(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm, float eps, Tensor(a!) kv, "
      "Tensor slot_mapping) -> Tensor",
      &rotate_and_store);
  m.def(
      "paged_attention(Tensor q, Tensor kv, Tensor block_tables, Tensor query_lens, Tensor context_lens, float scale, "
      "int window, Tensor? sinks=None) -> Tensor",
      &paged_attention);
  m.def("multiply_heads(Tensor x, Tensor weight, Tensor? scale, int num_outputs) -> Tensor", &heads_multiplied);
  m.def(
      "store_latents(Tensor latent, Tensor cos, Tensor sin, Tensor norm, float eps, Tensor(a!) kv, Tensor slot_mapping) -> ()",
      &store_latents);
  m.def(
      "absorb(Tensor q, Tensor latent, Tensor cos, Tensor sin, Tensor norm, float eps, Tensor up_key, Tensor? up_key_scale, "
      "int num_heads, Tensor(a!) kv, Tensor slot_mapping) -> Tensor",
      &absorb);
  m.def(
      "latent_attention(Tensor q, Tensor kv, Tensor block_tables, Tensor query_lens, Tensor context_lens, float scale, "
      "Tensor up_value, Tensor? up_value_scale, int value_dim) -> Tensor",
      &latent_attention);
  m.def(
      "convolve(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) inputs, Tensor firsts, Tensor lengths, Tensor slots, "
      "Tensor is_new, bool has_silu) -> Tensor",
      &convolve);
  m.def("delta_gates(Tensor a, Tensor b, Tensor rate, Tensor bias) -> Tensor", &delta_gates);
  m.def(
      "delta_rule(Tensor qkv, Tensor decay, Tensor beta, Tensor(a!) matrices, Tensor firsts, Tensor lengths, Tensor slots, "
      "Tensor is_new) -> Tensor",
      &delta_rule);
  m.def("scan_steps(Tensor dt, Tensor rate, Tensor bias, float least, float most) -> Tensor", &scan_steps);
  m.def(
      "scan(Tensor x, Tensor decay, Tensor steps, Tensor skip, Tensor(a!) matrices, Tensor firsts, Tensor lengths, "
      "Tensor slots, Tensor is_new) -> Tensor",
      &scan);
  m.def("largest(Tensor logits) -> Tensor", &largest);
  m.def("sample(Tensor(a!) logits, Tensor integers, Tensor numbers) -> Tensor", &sample);
  m.def("keep_freed_memory() -> ()", &keep_freed_memory);
  m.def("arithmetic() -> str", &arithmetic);
}
