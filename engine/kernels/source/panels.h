// How the weights of a product are kept: [N, K] in panels of 32 outputs, [N / 32, K / 2, 32, 2], the last one filled up
// with zeros. A pair of inputs times 16 outputs is one vector operation, 16 such pairs are a tile of the matrix unit, and a
// panel is read from end to end.
#pragma once

#include <ATen/ops/zeros.h>

#include "vectors.h"

namespace tandem {

constexpr int64_t PANEL = 2 * LANES;

// [N, K] into panels.
at::Tensor pack_weight(const at::Tensor& weight) {
  int64_t N = weight.size(0), K = weight.size(1), num_panels = (N + PANEL - 1) / PANEL;
  TORCH_CHECK(weight.is_contiguous() && K % 2 == 0, "weight [N, K], contiguous, K even");
  at::Tensor out = at::zeros({num_panels, K / 2, PANEL, 2}, weight.options());
  const bf16* from = data_of(weight);
  bf16* to = data_of(out);
  for_each_range(num_panels, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * PANEL; n < std::min(N, end * PANEL); n++)
      for (int64_t k = 0; k < K; k += 2) {
        int64_t pair = n / PANEL * (K / 2) + k / 2;
        std::memcpy(to + (pair * PANEL + n % PANEL) * 2, from + n * K + k, 4);
      }
  });
  return out;
}

}  // namespace tandem
