#pragma once
// Fibers: stacks on one operating-system thread, entered and left without a system call.
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace simt {

class Fiber {
 public:
  using Entry = void (*)(Fiber&);

  // The caller's own stack, to which other fibers return.
  Fiber() = default;

  Fiber(Entry entry, unsigned number) : entry_(entry), started_(false) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = kStackBytes + page;
    void* const memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    // The lowest page is protected, so that a stack cannot grow into its neighbour.
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
      std::perror("simt: no memory for the stack of a thread");
      std::abort();
    }
    memory_ = static_cast<char*>(memory);
    getcontext(&context_);
    context_.uc_stack.ss_sp = memory_ + page;
    // Stacks start at different offsets of a page, or they would compete for a few cache sets.
    context_.uc_stack.ss_size = kStackBytes - number * 320 % 4096 / 64 * 64;
    makecontext(&context_, &Fiber::begin, 0);
  }

  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (memory_) munmap(memory_, size_);
  }

  // Suspends `from` and runs this fiber; returns when `from` is resumed.
  __attribute__((noinline)) void resume_from(Fiber& from) {
    if (__builtin_setjmp(from.registers_) == 0) resume();
  }

  [[noreturn]] __attribute__((noinline)) void resume() {
    if (started_) __builtin_longjmp(registers_, 1);
    started_ = true;
    starting = this;
    setcontext(&context_);
    std::abort();
  }

 private:
  // Kernel parameters may take 32 KiB; pages that are not used cost no memory.
  static constexpr size_t kStackBytes = 128 << 10;

  static void begin() {
    Fiber& self = *starting;
    self.entry_(self);
    std::abort();
  }

  static inline Fiber* starting;

  Entry entry_ = nullptr;
  bool started_ = true;
  char* memory_ = nullptr;
  size_t size_ = 0;
  void* registers_[5];
  ucontext_t context_;
};

}  // namespace simt
