// Memory for weights in pages of 2 MB, where the kernel has them. Weights are read from end to end in every step, and with
// pages of 4 KB each page is another walk through the tables of the process, and under a virtual machine through those of
// its host: two cores of a Xeon that read 25 GB/s of small pages read 30 to 39 of huge ones.
//
//   chunk   64 MB of address space, or one tensor's if that is more, handed out from its begin; pages come as they are touched
//   tensor  keeps its chunk; the last one unmaps it
//
// Where the host has to find each huge page first, 2 MB take 10 ms: when that has cost a process a quarter of a second more
// than quick pages would have, small pages do for the rest.
#pragma once

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "vectors.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <time.h>
#endif

namespace tandem {

#if defined(__linux__)

class HugePages {
 public:
  // For any number of threads.
  static at::Tensor zeros(at::IntArrayRef shape, at::TensorOptions options) {
    static std::mutex mutex;
    static std::weak_ptr<HugePages> current;  // goes with its last tensor
    const int64_t bytes = c10::multiply_integers(shape) * int64_t(options.dtype().itemsize());
    std::lock_guard<std::mutex> guard(mutex);
    std::shared_ptr<HugePages> chunk = current.lock();
    if (!chunk || chunk->used_ + bytes > chunk->size_) {
      chunk = std::make_shared<HugePages>(std::max(bytes, CHUNK));
      if (bytes < CHUNK) current = chunk;
    }
    return at::from_blob(chunk->take(bytes), shape, [chunk](void*) {}, options);
  }

  explicit HugePages(int64_t bytes) : size_((bytes + PAGE - 1) / PAGE * PAGE), mapped_(size_ + PAGE) {
    memory_ = mmap(nullptr, size_t(mapped_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory_ != MAP_FAILED, "out of memory: ", mapped_, " bytes of address space for weights");
    begin_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_) + PAGE - 1) / PAGE * PAGE);
    ask_for_huge_pages(!has_given_up_);
  }
  HugePages(const HugePages&) = delete;
  ~HugePages() { munmap(memory_, size_t(mapped_)); }

 private:
  static constexpr int64_t PAGE = 2 << 20, CHUNK = 64 << 20, SMALL_PAGE = 4096, LINE = 64;
  static constexpr double BYTES_PER_S = 5e8, PATIENCE_S = 0.25;

  // Touches a tensor's pages, which is when they come: each thread those that it will fill, near its own core.
  char* take(int64_t bytes) {
    char* taken = begin_ + used_;
    used_ += (bytes + LINE - 1) / LINE * LINE;
    for_each_range((bytes + PAGE - 1) / PAGE, [&](int64_t first, int64_t last) {
      for (int64_t page = first; page < last; page++) touch(taken + page * PAGE, std::min(PAGE, bytes - page * PAGE));
    });
    return taken;
  }

  void touch(volatile char* from, int64_t bytes) {
    const double start_s = thread_time_s();
    for (int64_t i = 0; i < bytes; i += SMALL_PAGE) from[i] = 0;
    const auto late_us = int64_t(1e6 * (thread_time_s() - start_s - double(bytes) / BYTES_PER_S));
    if (late_us > 0 && (late_us_ += late_us) > int64_t(1e6 * PATIENCE_S) && !has_given_up_.exchange(true)) ask_for_huge_pages(false);
  }

  // A kernel without them says no, and that is all.
  void ask_for_huge_pages(bool wanted) { madvise(begin_, size_t(size_), wanted ? MADV_HUGEPAGE : MADV_NOHUGEPAGE); }

  // Of this thread alone: not what others take of its core meanwhile.
  static double thread_time_s() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
  }

  inline static std::atomic<int64_t> late_us_{0};  // what pages slower than that have cost this process beyond
  inline static std::atomic<bool> has_given_up_{false};
  int64_t size_, mapped_, used_ = 0;
  void* memory_;
  char* begin_;
};

inline at::Tensor zeros_for_weights(at::IntArrayRef shape, at::TensorOptions options) { return HugePages::zeros(shape, options); }

#else

inline at::Tensor zeros_for_weights(at::IntArrayRef shape, at::TensorOptions options) { return at::zeros(shape, options); }

#endif

}  // namespace tandem
