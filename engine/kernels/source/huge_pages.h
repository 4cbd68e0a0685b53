// Memory for weights in pages of 2 MB, where the kernel has them. Weights are read from end to end in every step, and with
// pages of 4 KB each page is another walk through the tables of the process, and under a virtual machine through those of
// its host: two cores of a Xeon that read 25 GB/s of small pages read 30 to 39 of huge ones.
//
//   chunk   64 MB of address space, or one tensor's if that is more, handed out from its begin; pages come as they are touched
//   tensor  keeps its chunk; the last one unmaps it
//
// Where the host has to find each huge page first, 2 MB take 10 ms: when that has cost a quarter of a second, small pages
// do for the rest.
#pragma once

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <memory>
#include <mutex>

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
    if (!chunk || chunk->used_ + bytes > chunk->size_) current = chunk = std::make_shared<HugePages>(std::max(bytes, CHUNK));
    return at::from_blob(chunk->take(bytes), shape, [chunk](void*) {}, options);
  }

  explicit HugePages(int64_t bytes) : size_((bytes + PAGE - 1) / PAGE * PAGE), mapped_(size_ + PAGE) {
    memory_ = mmap(nullptr, size_t(mapped_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory_ != MAP_FAILED, "no memory for ", size_, " bytes of weights");
    begin_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_) + PAGE - 1) / PAGE * PAGE);
    if (late_s_ <= PATIENCE_S) madvise(begin_, size_t(size_), MADV_HUGEPAGE);  // a kernel without them says no, and that is all
  }
  HugePages(const HugePages&) = delete;
  ~HugePages() { munmap(memory_, size_t(mapped_)); }

 private:
  static constexpr int64_t PAGE = 2 << 20, CHUNK = 64 << 20, SMALL_PAGE = 4096, LINE = 64;
  static constexpr double SLOWEST_BYTES_PER_S = 5e8, PATIENCE_S = 0.25;

  // Touches a tensor's pages, which is when they come.
  char* take(int64_t bytes) {
    char* taken = begin_ + used_;
    used_ += (bytes + LINE - 1) / LINE * LINE;
    for (int64_t at = 0; at < bytes; at += PAGE) {
      const double start_s = thread_time_s();
      const int64_t end = std::min(bytes, at + PAGE);
      for (int64_t i = at; i < end; i += SMALL_PAGE) const_cast<volatile char*>(taken)[i] = 0;
      late_s_ += thread_time_s() - start_s - double(end - at) / SLOWEST_BYTES_PER_S;
      late_s_ = std::max(late_s_, 0.0);
      if (late_s_ > PATIENCE_S) madvise(begin_, size_t(size_), MADV_NOHUGEPAGE);
    }
    return taken;
  }

  // Of this thread alone: not what others take of its core meanwhile.
  static double thread_time_s() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
  }

  inline static double late_s_ = 0;  // how far behind that speed this process is
  int64_t size_, mapped_, used_ = 0;
  void* memory_;
  char* begin_;
};

inline at::Tensor zeros_for_weights(at::IntArrayRef shape, at::TensorOptions options) { return HugePages::zeros(shape, options); }

#else

inline at::Tensor zeros_for_weights(at::IntArrayRef shape, at::TensorOptions options) { return at::zeros(shape, options); }

#endif

}  // namespace tandem
