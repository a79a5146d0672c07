#pragma once
// How the CPU kernels get threads without knowing torch. No result depends on which thread runs
// what.
#include <cstdint>
#include <type_traits>

namespace specdec {

struct Parallel {
  void (*run)(void* self, int64_t n, void (*body)(void* context, int64_t begin, int64_t end),
              void* context);
  void* self;   // may be null
  int threads;  // at most this many bodies at once

  // Calls f(begin, end) on disjoint ranges that cover [0, n), at most one for each thread;
  // one thread may take several.
  template <class F>
  void operator()(int64_t n, F&& f) const {
    if (threads <= 1 || n <= 1) {
      if (n > 0) f(int64_t{0}, n);
      return;
    }
    run(
        self, n,
        [](void* context, int64_t begin, int64_t end) {
          (*static_cast<std::remove_reference_t<F>*>(context))(begin, end);
        },
        &f);
  }
};

inline Parallel serial() { return {nullptr, nullptr, 1}; }

}  // namespace specdec
