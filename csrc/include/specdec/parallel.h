#pragma once
// How a torch-free kernel gets its threads. Which thread runs what never changes a result.
#include <cstdint>
#include <type_traits>

namespace specdec {

struct Parallel {
  void (*run)(void* self, int64_t n, void (*body)(void* context, int64_t begin, int64_t end),
              void* context);
  void* self;   // may be null
  int threads;  // at most this many bodies at once

  // f(begin, end) over disjoint parts of [0, n); contiguous parts, one a thread.
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
