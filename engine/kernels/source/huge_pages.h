// Allocates weights in huge pages of 2 MB, if the kernel supports them. Every step reads all weights; with pages of 4
// KB, each page costs a walk through the page tables of the process and, in a virtual machine, through those of the
// host. Two cores of a Xeon that read 25 GB/s from small pages read 30 to 39 GB/s from huge ones.
//
//   chunk   64 MB of address space, or one tensor if larger, allocated from its start; pages are mapped when touched
//   tensor  keeps its chunk alive; the last tensor unmaps it
//
// If the host must first assemble each huge page, mapping 2 MB takes 10 ms. Once this has cost a process a quarter of a
// second more than fast pages would, the remaining memory uses small pages.
#pragma once

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "vectors.h"

// The address sanitizer only sees what lies beside a tensor if its memory comes from the C library.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#define TANDEM_HUGE_PAGES 1
#include <sys/mman.h>
#include <time.h>
#endif

namespace tandem {

#if TANDEM_HUGE_PAGES

class HugePages {
 public:
  // Thread-safe.
  static at::Tensor zeros(at::IntArrayRef shape, at::TensorOptions options) {
    static std::mutex mutex;
    static std::weak_ptr<HugePages> current;  // freed with its last tensor
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

  // Touches the pages of a tensor, which maps them: each thread touches those that it will fill, so they are near its
  // core.
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

  // On a kernel without huge pages, this has no effect.
  void ask_for_huge_pages(bool wanted) { madvise(begin_, size_t(size_), wanted ? MADV_HUGEPAGE : MADV_NOHUGEPAGE); }

  // CPU time of this thread only, without the time that others use its core.
  static double thread_time_s() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
  }

  inline static std::atomic<int64_t> late_us_{0};  // time spent on touching pages, beyond BYTES_PER_S
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
