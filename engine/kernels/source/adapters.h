// Adds LoRA adapters to a product, to each row its own adapter: y[row] += up_a (down_a x[row]).
//
//   shrink   a separate call before the product: down_a x for each row that has an adapter, [T, ranks], as bfloat16
//   add      inside the product, before a sum is rounded: up_a times that, for the panel at hand
//
// So with adapters, each product of a step has only one additional parallel region, however many adapters the rows use.
// Rows without an adapter have the same sums as if no adapter existed. Each sum adds up its inputs in order, and then
// its ranks: the bits of a row depend on its own adapter and input, not on other rows or on the threads.
//
// The weights of each adapter in use are read once in a step. With rank 16 on all seven projections of a model of 135M
// parameters, they are 3.6 % of the model's weights; the operations are 3.6 % of a row's.
#pragma once

#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <vector>

#include "vectors.h"

namespace tandem {

// The rows of a step, grouped by adapter and in order; rows without an adapter are in no group.
struct AdapterRows {
  const int32_t* ids = nullptr;  // the adapter id of each row; 0: none
  int64_t num_rows = 0;
  std::vector<std::vector<int32_t>> of;  // by id

  // ids [T] int32, from 0 on.
  explicit AdapterRows(const at::Tensor& row_ids) : num_rows(row_ids.numel()) {
    TORCH_CHECK(row_ids.is_contiguous() && row_ids.scalar_type() == at::kInt, "adapter ids: [T] int32, contiguous");
    ids = row_ids.data_ptr<int32_t>();
    for (int64_t t = 0; t < num_rows; t++) {
      TORCH_CHECK(ids[t] >= 0 && ids[t] <= 4096, "adapter ids must be in [0, 4096]");
      if (ids[t] >= int64_t(of.size())) of.resize(ids[t] + 1);
      of[ids[t]].push_back(int32_t(t));
    }
    if (!of.empty()) of[0].clear();
  }
};

// Sums of R rows, which need not be adjacent, and 16 ranks. Pairs of inputs are added alternately to two accumulators:
// with few rows, each addition then waits less for the one before. The same two are used for any number of rows, so the
// bits stay the same.
template <int R>
void shrink_tile(const uint32_t* x, const int32_t* rows, int64_t pairs, const uint32_t* down, bf16* to, int64_t stride) {
  Sums acc[2][R][PARTS] = {};
  const uint32_t* from[R];
  for (int r = 0; r < R; r++) from[r] = x + rows[r] * pairs;
  auto add = [&](int64_t k, int turn) {
    Pairs weights[PARTS];
    for (int i = 0; i < PARTS; i++) weights[i] = load<Pairs>(down + k * LANES + i * REGISTER);
    for (int r = 0; r < R; r++)
      for (int i = 0; i < PARTS; i++) acc[turn][r][i] = dot_pairs(acc[turn][r][i], weights[i], from[r][k]);
  };
  int64_t k = 0;
  for (; k + 1 < pairs; k += 2) add(k, 0), add(k + 1, 1);
  if (k < pairs) add(k, 0);
  for (int r = 0; r < R; r++) store_bf16(to + rows[r] * stride, load<F16>(acc[0][r]) + load<F16>(acc[1][r]));
}

using ShrinkTile = void (*)(const uint32_t*, const int32_t*, int64_t, const uint32_t*, bf16*, int64_t);

template <int... R>
constexpr std::array<ShrinkTile, sizeof...(R)> shrink_tiles(std::integer_sequence<int, R...>) {
  return {shrink_tile<R + 1>...};
}

// What all adapters add to one product, which may consist of several stacked ones (q, k, v) or two side by side (gate,
// up).
struct AddedProduct : torch::CustomClassHolder {
#if defined(__AVX512F__)
  static constexpr int TILE_ROWS = 12;
#else
  static constexpr int TILE_ROWS = 3;
#endif
  static constexpr int64_t ROWS_OF_ITEM = 8 * TILE_ROWS;
  static constexpr int64_t BYTES_FOR_THREADS = 1 << 16;  // for less, starting the threads takes longer than computing

  // 16 outputs: the pairs of ranks that they are computed from, and where their weights begin, in pairs of 16 outputs.
  struct Sixteen {
    int32_t first_pair, num_pairs;
    int64_t at;
  };
  struct OfOne {
    at::Tensor down;  // [ranks / 16, K / 2, 16, 2]
    at::Tensor up;    // [pairs of all sixteens, 16, 2]
    std::vector<Sixteen> sixteens;  // in the order of the product's panels, two for each panel

    const bf16* down_data() const { return data_of(down); }
    int64_t num_ranks() const { return down.size(0) * LANES; }
  };
  int64_t num_inputs, num_sixteens;
  std::vector<OfOne> by_id;  // empty for an adapter that adds nothing here

  AddedProduct(int64_t num_inputs, int64_t num_sixteens) : num_inputs(num_inputs), num_sixteens(num_sixteens) {
    TORCH_CHECK(num_inputs % 2 == 0 && num_sixteens % 2 == 0, "inputs in pairs, and two sixteens a panel");
  }

  // pairs [sixteens, 2] int64: the first pair and the number of pairs.
  void add(int64_t id, const at::Tensor& down, const at::Tensor& up, const at::Tensor& pairs) {
    TORCH_CHECK(id > 0 && id <= 4096, "an adapter's id must be in [1, 4096]");
    TORCH_CHECK(down.dim() == 4 && down.is_contiguous() && down.size(0) > 0 && down.size(1) * 2 == num_inputs &&
                down.size(2) == LANES && down.size(3) == 2, "down in sixteens, of the product's inputs");
    TORCH_CHECK(up.dim() == 3 && up.is_contiguous() && up.size(1) == LANES && up.size(2) == 2, "up [pairs, 16, 2]");
    TORCH_CHECK(pairs.dim() == 2 && pairs.is_contiguous() && pairs.scalar_type() == at::kLong &&
                pairs.size(0) == num_sixteens && pairs.size(1) == 2, "pairs [sixteens, 2] int64");
    data_of(down), data_of(up);
    OfOne one{down, up, {}};
    const int64_t* p = pairs.data_ptr<int64_t>();
    int64_t at = 0;
    for (int64_t i = 0; i < num_sixteens; at += p[2 * i + 1], i++) {
      TORCH_CHECK(p[2 * i] >= 0 && p[2 * i + 1] >= 0 && p[2 * i] + p[2 * i + 1] <= one.num_ranks() / 2, "pairs of its ranks");
      one.sixteens.push_back({int32_t(p[2 * i]), int32_t(p[2 * i + 1]), at});
    }
    TORCH_CHECK(at == up.size(0), "up must have the pairs of all sixteens");
    if (id >= int64_t(by_id.size())) by_id.resize(id + 1);
    by_id[id] = std::move(one);
  }

  void remove(int64_t id) {
    if (find(id)) by_id[id] = {};
  }

  const OfOne* find(int64_t id) const {
    return id < int64_t(by_id.size()) && by_id[id].down.defined() ? &by_id[id] : nullptr;
  }
};

// What adapters add to one product in one step. Constructed from the product's input, before the product.
class Adding {
 public:
  // `product` or `rows` is null if nothing is added.
  Adding(const AddedProduct* product, const AdapterRows* rows, const at::Tensor& x) {
    if (!product || !rows) return;
    int64_t ranks = 0, bytes = 0;
    std::vector<Item> items;
    for (size_t id = 1; id < rows->of.size(); id++) {
      const AddedProduct::OfOne* one = rows->of[id].empty() ? nullptr : product->find(int64_t(id));
      if (!one) continue;
      ranks = std::max(ranks, one->num_ranks());
      bytes += one->down.numel() * int64_t(sizeof(bf16)) * (1 + int64_t(rows->of[id].size()) / AddedProduct::TILE_ROWS);
      int64_t num_rows = int64_t(rows->of[id].size());
      for (int64_t sixteen = 0; sixteen < one->down.size(0); sixteen++)
        for (int64_t first = 0; first < num_rows; first += AddedProduct::ROWS_OF_ITEM)
          items.push_back({one, &rows->of[id], sixteen, first, std::min(num_rows, first + AddedProduct::ROWS_OF_ITEM)});
    }
    if (items.empty()) return;
    TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.size(0) == rows->num_rows && x.size(1) == product->num_inputs,
                "x [T, K], contiguous, one row for each adapter id");
    product_ = product, ids_ = rows->ids, stride_ = ranks;
    shrunk_ = at::empty({x.size(0), ranks}, x.options());
    pairs_ = reinterpret_cast<const uint32_t*>(data_of(shrunk_));
    shrink(items, reinterpret_cast<const uint32_t*>(data_of(x)), bytes);
  }

  explicit operator bool() const { return product_; }

  // Adds to the sums of one row and panel.
  void add(int64_t row, int64_t panel, F16* sums) const {
    const AddedProduct::OfOne* one = ids_[row] ? product_->find(ids_[row]) : nullptr;
    if (!one) return;
    const uint32_t *from = pairs_ + row * (stride_ / 2), *up = reinterpret_cast<const uint32_t*>(one->up.data_ptr());
    for (int i = 0; i < 2; i++) {
      const AddedProduct::Sixteen& sixteen = one->sixteens[2 * panel + i];
      const uint32_t *weights = up + sixteen.at * LANES, *shrunk = from + sixteen.first_pair;
      Sums acc[PARTS];
      std::memcpy(acc, sums + i, sizeof(acc));
      for (int32_t k = 0; k < sixteen.num_pairs; k++)
        for (int j = 0; j < PARTS; j++) acc[j] = dot_pairs(acc[j], load<Pairs>(weights + k * LANES + j * REGISTER), shrunk[k]);
      std::memcpy(sums + i, acc, sizeof(acc));
    }
  }

 private:
  struct Item {
    const AddedProduct::OfOne* one;
    const std::vector<int32_t>* rows;
    int64_t sixteen, begin, end;
  };

  void shrink(const std::vector<Item>& items, const uint32_t* x, int64_t bytes) {
    static constexpr std::array TILES = shrink_tiles(std::make_integer_sequence<int, AddedProduct::TILE_ROWS>());
    bf16* to = data_of(shrunk_);
    const int64_t pairs = product_->num_inputs / 2;
    auto work = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const Item& item = items[i];
        const uint32_t* down = reinterpret_cast<const uint32_t*>(item.one->down_data()) + item.sixteen * pairs * LANES;
        for (int64_t first = item.begin; first < item.end; first += AddedProduct::TILE_ROWS) {
          int64_t num_rows = std::min<int64_t>(item.end - first, AddedProduct::TILE_ROWS);
          TILES[num_rows - 1](x, item.rows->data() + first, pairs, down, to + item.sixteen * LANES, stride_);
        }
      }
    };
    if (bytes < AddedProduct::BYTES_FOR_THREADS) work(0, int64_t(items.size()));
    else for_each_range(int64_t(items.size()), work);
  }

  const AddedProduct* product_ = nullptr;
  const int32_t* ids_ = nullptr;
  at::Tensor shrunk_;  // [T, the largest rank of the adapters in use]
  const uint32_t* pairs_ = nullptr;
  int64_t stride_ = 0;
};

}  // namespace tandem
