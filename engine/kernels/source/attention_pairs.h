// The two products of attention with vector instructions: scores of 1 to ROW_TILE rows, which share each load of keys,
// and the sums of values that the rows weigh. With the matrix unit: attention_tiles.h.
#pragma once

#include "vectors.h"

namespace tandem {

constexpr int KEY_TILES = 4;                       // tiles of 16 keys scored in one call
constexpr int KEYS = KEY_TILES * LANES;
#if defined(__AVX512F__)
constexpr int ROW_TILE = 6;                        // rows (token, query head) that share a load of keys or values
constexpr int TOGETHER = 4;                        // tiles of keys, or of 16 dims, that share a load of rows
#else
constexpr int ROW_TILE = 3, TOGETHER = 2;          // the sums then fill 12 of 16 registers
#endif

// Scores of R rows against NJ tiles of 16 keys: score[r * KEYS + 16 j ..]. `stride`: number of pairs between dim pairs.
template <int R, int NJ>
void score_tile(const uint32_t* q, int64_t dim_pairs, const uint32_t* const* keys, int64_t stride, float* score) {
  Sums acc[R][NJ * PARTS] = {};
  for (int64_t d = 0; d < dim_pairs; d++) {
    Pairs k[NJ * PARTS];
    for (int i = 0; i < NJ * PARTS; i++) k[i] = load<Pairs>(keys[i / PARTS] + d * stride + i % PARTS * REGISTER);
    for (int r = 0; r < R; r++)
      for (int i = 0; i < NJ * PARTS; i++) acc[r][i] = dot_pairs(acc[r][i], k[i], q[r * dim_pairs + d]);
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < NJ * PARTS; i++) store(score + r * KEYS + i * REGISTER, acc[r][i]);
}

// out[r, 16 * ND dims] += sum over NJ tiles of p[r, key] * value[key]
template <int R, int ND>
void weigh_tile(const uint32_t* p, const uint32_t* const* values, int num_tiles, int64_t H, float* out) {
  constexpr int N = ND * PARTS;
  Sums acc[R][N];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) acc[r][i] = load<Sums>(out + r * H + i * REGISTER);
  for (int j = 0; j < num_tiles; j++)
    for (int s = 0; s < LANES / 2; s++) {
      Pairs v[N];
      for (int i = 0; i < N; i++) v[i] = load<Pairs>(values[j] + s * H + i * REGISTER);
      for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) acc[r][i] = dot_pairs(acc[r][i], v[i], p[r * (KEYS / 2) + j * (LANES / 2) + s]);
    }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) store(out + r * H + i * REGISTER, acc[r][i]);
}

template <int R>
void score_rows(int num_tiles, const uint32_t* q, int64_t dim_pairs, const uint32_t* const* keys, int64_t stride, float* score) {
  if constexpr (TOGETHER < KEY_TILES)
    for (; num_tiles > TOGETHER; num_tiles -= TOGETHER, keys += TOGETHER, score += TOGETHER * LANES)
      score_tile<R, TOGETHER>(q, dim_pairs, keys, stride, score);
  switch (num_tiles) {
    case 1: return score_tile<R, 1>(q, dim_pairs, keys, stride, score);
    case 2: return score_tile<R, 2>(q, dim_pairs, keys, stride, score);
    case 3: return score_tile<R, 3>(q, dim_pairs, keys, stride, score);
    default: return score_tile<R, 4>(q, dim_pairs, keys, stride, score);
  }
}

template <int R>
void weigh_rows(const uint32_t* p, const uint32_t* const* values, int num_tiles, int64_t H, float* out) {
  const uint32_t* at[KEY_TILES];
  for (int64_t d = 0; d < H;) {
    for (int j = 0; j < num_tiles; j++) at[j] = values[j] + d;
    int64_t left = (H - d) / LANES;
    if (left >= 4 && TOGETHER >= 4) weigh_tile<R, 4>(p, at, num_tiles, H, out + d), d += 4 * LANES;
    else if (left >= 2) weigh_tile<R, 2>(p, at, num_tiles, H, out + d), d += 2 * LANES;
    else weigh_tile<R, 1>(p, at, num_tiles, H, out + d), d += LANES;
  }
}

using ScoreRows = void (*)(int, const uint32_t*, int64_t, const uint32_t* const*, int64_t, float*);
using WeighRows = void (*)(const uint32_t*, const uint32_t* const*, int, int64_t, float*);
constexpr ScoreRows SCORE_ROWS[] = {score_rows<1>, score_rows<2>, score_rows<3>, score_rows<4>, score_rows<5>, score_rows<6>};
constexpr WeighRows WEIGH_ROWS[] = {weigh_rows<1>, weigh_rows<2>, weigh_rows<3>, weigh_rows<4>, weigh_rows<5>, weigh_rows<6>};

}  // namespace tandem
