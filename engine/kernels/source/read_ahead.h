// Memory that is asked for while products compute: weights that come next, and the KV of attention that follows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace tandem {

// What will be read soon, and is asked for while products compute: memory in pieces of a page, each handed out once.
struct ReadAhead {
  static constexpr int64_t PIECE = 4096, LINE = 64;
  std::vector<const char*> pieces;
  std::atomic<int64_t> next{0};
};

// Which memory the tiles of one panel ask for: the next panel first, in the first two of them; then `other`, as long as
// there is any. With few rows, where reading is all the work, only panels.
struct Asking {
  std::vector<const char*> pieces;
  int lines = 0;

  void next_panel(const char* panel, int64_t panel_bytes, int64_t tile, int64_t num_tiles) {
    lines = num_tiles == 1 ? 2 : tile < 2 ? 1 : 0;
    ask(panel + (lines == 1 ? tile * (panel_bytes / 2) : 0), lines * (panel_bytes / 2));
  }

  void others(ReadAhead* other, int64_t pairs) {
    lines = 0;
    int64_t wanted = (2 * pairs * ReadAhead::LINE + ReadAhead::PIECE - 1) / ReadAhead::PIECE;
    if (!other || other->next + wanted > int64_t(other->pieces.size())) return;
    int64_t first = other->next.fetch_add(wanted);
    if (first + wanted > int64_t(other->pieces.size())) return;  // another thread took them just now
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
