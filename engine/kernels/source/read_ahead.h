// Prefetches memory while products compute: the weights that come next, and the KV of the attention that follows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace tandem {

// Memory to prefetch, in pieces of one page; each piece is handed out once.
struct ReadAhead {
  static constexpr int64_t PIECE = 4096, LINE = 64;
  std::vector<const char*> pieces;
  std::atomic<int64_t> next{0};
};

// Memory to prefetch, evenly while pairs of inputs are multiplied, two after two: in bursts, the loads that are
// waited for would queue behind it.
struct EvenlyAhead {
  EvenlyAhead(const char* begin, int64_t bytes, int64_t pairs) : at_(begin), bytes_of_two_((2 * bytes + pairs - 1) / pairs) {}

  void next() {
    for (int64_t i = 0; i < bytes_of_two_; i += ReadAhead::LINE) __builtin_prefetch(at_ + i, 0, 2);
    at_ += bytes_of_two_;
  }

 private:
  const char* at_;
  int64_t bytes_of_two_;
};

// Chooses the memory that the tiles of one panel prefetch, in products of pairs (product_tiles.h does this
// differently). First the next panel: one line for each pair in each of the first tiles, or the whole panel if there is
// only one tile. Then `other`, as long as pieces are left. With few rows, where reading is all the work, only panels.
struct Asking {
  std::vector<const char*> pieces;
  int lines = 0;

  // Returns whether this tile prefetches a part of the next panel, which has `pairs` pairs of `lines_of_pair` lines
  // each.
  bool next_panel(const char* panel, int64_t pairs, int64_t lines_of_pair, int64_t tile, int64_t num_tiles) {
    if (tile >= lines_of_pair) return false;
    lines = num_tiles == 1 ? int(lines_of_pair) : 1;
    ask(panel + tile * pairs * ReadAhead::LINE, lines * pairs * ReadAhead::LINE);
    return true;
  }

  void others(ReadAhead* other, int64_t pairs) {
    lines = 0;
    int64_t wanted = (2 * pairs * ReadAhead::LINE + ReadAhead::PIECE - 1) / ReadAhead::PIECE;
    if (!other || other->next + wanted > int64_t(other->pieces.size())) return;
    int64_t first = other->next.fetch_add(wanted);
    if (first + wanted > int64_t(other->pieces.size())) return;  // another thread has just taken them
    lines = 2;
    pieces.assign(other->pieces.begin() + first, other->pieces.begin() + first + wanted);
  }

 private:
  void ask(const char* begin, int64_t bytes) {
    pieces.clear();
    for (int64_t at = 0; at < bytes; at += ReadAhead::PIECE) pieces.push_back(begin + at);
  }
};

}  // namespace tandem
