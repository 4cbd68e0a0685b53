// Paged attention, for decode and for chunked prefill. Keys and values come from a layer of the pool: `PoolOfHeads`
// (head_attention.h) or `PoolOfLatents` (latent_attention.h).
//
// A token's result has the same bits however it is computed: alone or with others, in any chunk, by any number of
// threads. Keys are processed in tiles of 64 and pieces of 512, which begin at multiples of these numbers. Each piece
// is computed by itself, and the pieces are combined in order; masked keys contribute exactly nothing.
#pragma once

#include <optional>
#include <vector>

#include "attention_rows.h"
#include "attention_tiles.h"
#include "vectors.h"

namespace tandem {

// One work item: some tokens of one sequence, some key heads with all query heads that share them, and a range of keys.
// Either there is one token or one key head. A single token processes all heads of a block before the next block,
// because memory is read faster in order. With many tokens, an item processes the keys of one head, which then stay in
// the cache for all tokens.
struct Item {
  int64_t seq, kv_head, num_kv_heads, first_token, num_tokens, position, first_key, end_key;
  int64_t partial;  // its first row in the partial results, which are combined later; -1 if it has all keys
};

template <class Pool>
struct Attention {
  Pool pool;
  const bf16* q;           // [T, N, key dim]
  const int32_t* tables;   // [S, max_blocks]
  int64_t N, K;            // query heads and key heads
  int64_t max_blocks, window;
  float scale;             // scale of the scores times log2(e): the softmax uses powers of 2
  const float* sinks;      // [N] scores without values, or null
  bf16* out;
  int64_t out_of_token, out_of_head;  // numbers between the results of two tokens, and of two heads

  int64_t num_rows(const Item& item) const { return item.num_kv_heads * item.num_tokens * (N / K); }

  // Index of a row's token and query head in q; row = (key head * tokens + token) * G + query head within that key
  // head.
  int64_t head_of_row(const Item& item, int64_t r) const {
    int64_t G = N / K, per_kv_head = item.num_tokens * G;
    int64_t token = r % per_kv_head / G, head = (item.kv_head + r / per_kv_head) * G + r % G;
    return (item.first_token + token) * N + head;
  }

  // Computes all keys of an item. Returns the rows with the result, which are in `scratch`.
  Rows& run(const Item& item, Scratch& scratch) const {
    int64_t rows = num_rows(item), pairs = pool.key_dim / 2;
    for (int64_t r = 0; r < rows; r++)
      std::memcpy(scratch.q.data() + r * pairs, q + head_of_row(item, r) * pool.key_dim, pool.key_dim * sizeof(bf16));
    if (end_of_piece(item.first_key) >= item.end_key) return run_piece(item, item.first_key, item.end_key, scratch);
    scratch.whole.clear(rows, pool.value_dim);
    for (int64_t key = item.first_key; key < item.end_key; key = end_of_piece(key)) {
      run_piece(item, key, std::min(end_of_piece(key), item.end_key), scratch);
      for (int64_t r = 0; r < rows; r++) put_together(scratch.whole, r, scratch.piece, r, pool.value_dim);
    }
    return scratch.whole;
  }

  // Computes one piece. With the matrix unit, as many rows as fill a tile go from scores to sums before the next ones:
  // all data in between stays in the L1 cache. With vectors, which are slower, all rows are multiplied by the keys and
  // then by the values, which stay in the L1 cache.
  Rows& run_piece(const Item& item, int64_t first_key, int64_t end_key, Scratch& scratch) const {
    const int64_t rows = num_rows(item), rows_of_head = item.num_tokens * (N / K), tile_rows = height_of_tiles(rows_of_head);
    const int64_t tiles_together = std::max<int64_t>(1, (has_tiles() ? TILE_ROWS : MAX_ROWS) / tile_rows);
    scratch.piece.clear(rows, pool.value_dim);
    std::fill_n(scratch.sums.data(), rows * REGISTER, 0.0f);
    for (int64_t key = first_key; key < end_key; key += KEYS) {
      Keys keys = keys_from(item, key, end_key, scratch);
      for (int64_t first = 0, end; first < rows; first = end) {
        int64_t end_of_head = tile_rows < rows_of_head ? (first / rows_of_head + 1) * rows_of_head : rows;
        end = std::min(first + tiles_together * tile_rows, end_of_head);
        for (int64_t r = first; r < end; r += tile_rows)
          score(keys, r / rows_of_head, std::min(tile_rows, end - r), r, r - first, scratch);
        soften_rows(item, first, end - first, key, keys.num_tiles, scratch);
        for (int64_t r = first; r < end; r += tile_rows)
          weigh(keys, r / rows_of_head, std::min(tile_rows, end - r), r, r - first, scratch);
      }
    }
    for (int64_t r = 0; r < rows; r++) scratch.piece.sum[r] = sum_of(load<Sums>(scratch.sums.data() + r * REGISTER));
    return scratch.piece;
  }

  static int64_t height_of_tiles(int64_t rows_of_head) {
#if TANDEM_TILES
    if (has_tiles()) return tile_rows_of(rows_of_head);
#endif
    return std::min<int64_t>(rows_of_head, ROW_TILE);
  }

  // Up to 64 keys of an item's first key head and their values, in tiles of 16.
  struct Keys {
    int num_tiles;
    const uint32_t *keys[KEY_TILES], *values[KEY_TILES];
    int64_t head_in_scratch = -1;  // the head whose values scratch.values holds contiguously
  };

  Keys keys_from(const Item& item, int64_t key, int64_t end_key, Scratch& scratch) const {
    const int64_t numbers = LANES / 2 * pool.value_dim;
    Keys found{int(std::min<int64_t>(KEY_TILES, (end_key - key + LANES - 1) / LANES))};
    for (int j = 0; j < found.num_tiles; j++) {
      int64_t at = key + j * LANES, block = tables[item.seq * max_blocks + at / pool.block_size], slot = at % pool.block_size;
      found.keys[j] = pool.keys(block, item.kv_head, slot);
      found.values[j] = pool.values(block, item.kv_head, slot, scratch.values.data() + j * numbers);
    }
    return found;
  }

  // Writes the scores of one tile of rows of a key head, from `row` on, to `place` in scratch.
  void score(const Keys& keys, int64_t head, int64_t num_rows, int64_t row, int64_t place, Scratch& scratch) const {
    const int64_t pairs = pool.key_dim / 2, block_size = pool.block_size;
    const uint32_t *q = scratch.q.data() + row * pairs, *of_head[KEY_TILES];
    float* to = scratch.score.data() + place * KEYS;
    for (int j = 0; j < keys.num_tiles; j++) of_head[j] = keys.keys[j] + head * pool.pairs_of_head();
#if TANDEM_TILES
    if (has_tiles())
      return with_count(keys.num_tiles, [&](auto count) { score_rows_by_tiles(count, q, pairs, of_head, block_size, to, KEYS); });
#endif
    SCORE_ROWS[num_rows - 1](keys.num_tiles, q, pairs, of_head, block_size, to);
  }

  // Multiplies the weights at `place` by the values, and adds the result to the sums of the rows from `row` on.
  void weigh(Keys& keys, int64_t head, int64_t num_rows, int64_t row, int64_t place, Scratch& scratch) const {
    const int64_t V = pool.value_dim, offset = head * pool.pairs_of_head();
    const uint32_t* p = scratch.p.data() + place * (KEYS / 2);
    float* to = scratch.piece.out.data() + row * V;
#if TANDEM_TILES
    if (has_tiles()) {
      const uint32_t* steps[KEY_TILES / 2];
      for (int h = 0; 2 * h < keys.num_tiles; h++) steps[h] = values_of_step(keys, offset, h, head != keys.head_in_scratch, scratch);
      keys.head_in_scratch = head;
      for (int64_t d = 0; d < V; d += 4 * LANES)
        with_count(int(std::min<int64_t>(4, (V - d) / LANES)), [&](auto count) {
          weigh_rows_by_tiles(count, p, KEYS / 2, steps, (keys.num_tiles + 1) / 2, V, d, to);
        });
      return;
    }
#endif
    const uint32_t* of_head[KEY_TILES];
    for (int j = 0; j < keys.num_tiles; j++) of_head[j] = keys.values[j] + offset;
    WEIGH_ROWS[num_rows - 1](p, of_head, keys.num_tiles, V, to);
  }

#if TANDEM_TILES
  // Returns the values of 32 keys, contiguous: in place if they are, else copied to scratch; zeros for a missing tile.
  const uint32_t* values_of_step(const Keys& keys, int64_t offset, int step, bool is_new, Scratch& scratch) const {
    const int64_t numbers = LANES / 2 * pool.value_dim;
    const bool has_both = 2 * step + 1 < keys.num_tiles;
    const uint32_t* first = keys.values[2 * step] + offset;
    const uint32_t* second = has_both ? keys.values[2 * step + 1] + offset : nullptr;
    if (second == first + numbers) return first;
    uint32_t* to = scratch.values.data() + step * 2 * numbers;
    if (!is_new) return to;
    if (first != to) std::memcpy(to, first, numbers * sizeof(uint32_t));
    if (has_both) std::memcpy(to + numbers, second, numbers * sizeof(uint32_t));
    else std::memset(to + numbers, 0, numbers * sizeof(uint32_t));
    return to;
  }
#endif

  // Turns the scores of some rows and up to 64 keys, from `key` on, into weights; the first row in scratch is
  // `first_row`.
  void soften_rows(const Item& item, int64_t first_row, int64_t num_rows, int64_t key, int num_tiles, Scratch& scratch) const {
    int64_t G = N / K, per_kv_head = item.num_tokens * G;
    with_count(num_tiles, [&](auto tiles) {
      constexpr int TILES = int(decltype(tiles)::size());
      for (int64_t i = 0; i < num_rows; i++) {
        int64_t r = first_row + i, position = item.position + r % per_kv_head / G;
        const float* score = scratch.score.data() + i * KEYS;
        bf16* p = reinterpret_cast<bf16*>(scratch.p.data() + i * (KEYS / 2));
        bool is_cut = key + TILES * LANES > position + 1 || (window && key <= position - window);
        if (is_cut) soften<TILES, true>(score, p, scratch, r, key, position);
        else soften<TILES, false>(score, p, scratch, r, key, position);
      }
    });
  }

  // Turns the scores of one row into weights, rounded to pairs of bfloat16. The row's base is raised to the largest
  // score only if that exceeds it by more than HEADROOM. This is rare after a row's first keys, so sums are seldom
  // rescaled, and the largest score is seldom computed. (As in FlashAttention-4, flash_attn/cute/softmax.py:
  // `rescale_threshold`.)
  template <int TILES, bool IS_CUT>
  void soften(const float* score, bf16* p, Scratch& scratch, int64_t r, int64_t key, int64_t position) const {
    static constexpr int32_t NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Ints lane = load<Ints>(NUMBERS);
    Sums s[TILES * PARTS], top = broadcast(MASKED);
    for (int i = 0; i < TILES * PARTS; i++) {
      s[i] = load<Sums>(score + i * REGISTER);
      if constexpr (IS_CUT) {
        Ints behind = int32_t(position - key - i * REGISTER) - lane;  // distance to the row's own position
        s[i] = behind < 0 ? broadcast(MASKED) : s[i];
        if (window) s[i] = behind >= int32_t(window) ? broadcast(MASKED) : s[i];
      }
      top = s[i] > top ? s[i] : top;
    }
    if (is_any_above(top * scale, scratch.piece.base[r] + HEADROOM)) raise_base(scratch, r, max_of(top) * scale);
    const float base = scratch.piece.base[r];
    float* sums = scratch.sums.data() + r * REGISTER;
    Sums sum = load<Sums>(sums);
    for (int i = 0; i < TILES * PARTS; i++) {
      Sums weight = exp2_of(s[i] * scale - base);
      if constexpr (IS_CUT) weight = s[i] < MASKED / 2 ? Sums{} : weight;  // NaN stays NaN
      sum += weight;
      store_bf16(p + i * REGISTER, weight);
    }
    if constexpr (TILES % 2) std::memset(p + TILES * LANES, 0, LANES * sizeof(bf16));  // the matrix unit takes 32 keys
    store(sums, sum);
  }

  // Rescales what a row has added up so far to another base.
  __attribute__((noinline)) void raise_base(Scratch& scratch, int64_t r, float base) const {
    float by = exp2_of(scratch.piece.base[r] - base);
    scratch.piece.base[r] = base;
    float *sums = scratch.sums.data() + r * REGISTER, *out = scratch.piece.out.data() + r * pool.value_dim;
    for (int i = 0; i < REGISTER; i++) sums[i] *= by;
#pragma omp simd
    for (int64_t d = 0; d < pool.value_dim; d++) out[d] *= by;
  }

  // Writes the result of an item's row r, which is row `at` of `rows`.
  void finish(const Item& item, int64_t r, const Rows& rows, int64_t at) const {
    int64_t head = head_of_row(item, r);
    float sum = sinks ? sum_with(sinks[head % N], rows.sum[at], rows.base[at]) : rows.sum[at], inverse = 1.0f / sum;
    const float* row = rows.out.data() + at * pool.value_dim;
    bf16* to = out + head / N * out_of_token + head % N * out_of_head;
#pragma omp simd
    for (int64_t d = 0; d < pool.value_dim; d++) to[d] = to_bf16(row[d] * inverse);
  }
};

// The work items of one call. The pieces of a single token are separate items, so that all threads have work.
struct Work {
  std::vector<Item> items;
  int64_t num_partials = 0;
};

template <class Pool>
Work work_of(const Attention<Pool>& attention, int64_t num_seqs, const int32_t* query_lens, const int32_t* context_lens) {
  const int64_t K = attention.K, G = attention.N / K, window = attention.window;
  const int64_t tile = std::max<int64_t>(1, std::min<int64_t>(32, MAX_ROWS / G));
  // An item has all heads of a sequence, unless that would leave threads without work.
  const int64_t heads_together = num_seqs >= 4 * at::get_num_threads() && G <= TILE_ROWS ? std::min(K, MAX_ROWS / G) : 1;
  Work work;
  int64_t first_token = 0;
  for (int64_t seq = 0; seq < num_seqs; first_token += query_lens[seq++])
    for (int64_t start = 0; start < query_lens[seq]; start += tile) {
      int64_t num_tokens = std::min<int64_t>(tile, query_lens[seq] - start), position = context_lens[seq] - query_lens[seq] + start;
      int64_t begin = window ? std::max<int64_t>(0, position - window + 1) / KEYS * KEYS : 0;
      int64_t end = position + num_tokens, heads = num_tokens == 1 ? heads_together : 1;
      bool is_split = num_tokens == 1 && end_of_piece(begin) < end;
      for (int64_t k = 0; k < K; k += heads)
        for (int64_t key = begin; key < end; key = is_split ? end_of_piece(key) : end) {
          Item item{seq, k, std::min(heads, K - k), first_token + start, num_tokens, position, key, end, -1};
          if (is_split) {
            item.end_key = std::min(end_of_piece(key), end);
            item.partial = work.num_partials;
            work.num_partials += attention.num_rows(item);
          }
          work.items.push_back(item);
        }
    }
  return work;
}

// Combines the pieces of single tokens whose keys were split into several items, each with its rows in `partials`. The
// items of one token and key head are adjacent.
template <class Pool>
void finish_pieces(const Attention<Pool>& attention, const std::vector<Item>& items, const Rows& partials) {
  const int64_t num_items = int64_t(items.size()), V = attention.pool.value_dim;
  Rows whole(MAX_ROWS, V);
  for (int64_t i = 0, end; i < num_items; i = end) {
    const Item& item = items[i];
    const auto is_same = [&](const Item& other) { return other.first_token == item.first_token && other.kv_head == item.kv_head; };
    for (end = i + 1; end < num_items && is_same(items[end]);) end++;
    if (item.partial < 0) continue;
    const int64_t rows = attention.num_rows(item);
    whole.clear(rows, V);
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t j = i; j < end; j++) put_together(whole, r, partials, items[j].partial + r, V);
      attention.finish(item, r, whole, r);
    }
  }
}

// Computes a step: sequence i has query_lens[i] tokens, the last of its context_lens[i] tokens.
template <class Pool>
void attend(const Attention<Pool>& attention, int64_t num_seqs, const int32_t* query_lens, const int32_t* context_lens) {
  const int64_t V = attention.pool.value_dim;
  const Work work = work_of(attention, num_seqs, query_lens, context_lens);
  const std::vector<Item>& items = work.items;
  const int64_t num_items = int64_t(items.size());
  Rows partials(work.num_partials, V);
  std::atomic<int64_t> next{0};
  auto work_until_done = [&](int64_t, int64_t) {
    Scratch scratch(attention.pool.key_dim, V);
#if TANDEM_TILES
    std::optional<TileShapes> shapes;
    if (has_tiles()) shapes.emplace();
    int64_t shaped_rows = 0;
#endif
    for (int64_t i = num_items - 1 - next++; i >= 0; i = num_items - 1 - next++) {  // from the end: the longest first
      const Item& item = items[i];
#if TANDEM_TILES
      if (int64_t tile_rows = tile_rows_of(item.num_tokens * (attention.N / attention.K)); shapes && tile_rows != shaped_rows)
        TileShapes::use(attention_shapes(shaped_rows = tile_rows));
#endif
      const Rows& rows = attention.run(item, scratch);
      for (int64_t r = 0; r < attention.num_rows(item); r++)
        if (item.partial < 0) attention.finish(item, r, rows, r);
        else partials.take(item.partial + r, rows, r, V);
    }
  };
  int64_t num_threads = std::min<int64_t>(at::get_num_threads(), num_items);
  if (num_threads > 1) at::parallel_for(0, num_threads, 1, work_until_done);
  else work_until_done(0, 1);

  if (work.num_partials) finish_pieces(attention, items, partials);
}

}  // namespace tandem
