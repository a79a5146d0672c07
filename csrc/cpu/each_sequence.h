#pragma once
#include <atomic>

#include "specdec/parallel.h"

namespace specdec::cpu {

// Calls f(i, inner, state) for each sequence i in [0, n). If there are enough sequences they run
// side by side, each on whichever thread is free, because they stop at different rows; else one
// after the other, with all threads inside each. `work` counts row entries: a little is not worth
// waking a thread. Every order computes the same numbers.
template <class State, class F>
void each_sequence(const Parallel& threads, int64_t n, int64_t work, F&& f) {
  constexpr int64_t kWorthwhile = 32768;
  const Parallel parallel = work < kWorthwhile ? serial() : threads;
  if (parallel.threads == 1 || 2 * n < parallel.threads || n == 1) {
    State state;
    for (int64_t i = 0; i < n; ++i) f(i, parallel, state);
    return;
  }
  std::atomic<int64_t> next{0};
  const int64_t workers = n < parallel.threads ? n : parallel.threads;
  parallel(workers, [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) {
      State state;
      for (int64_t i; (i = next.fetch_add(1)) < n;) f(i, serial(), state);
    }
  });
}

}  // namespace specdec::cpu
