#pragma once
// Barriers of a block. They are stricter than on a device, which does not wait for threads that
// have returned: here every thread has to arrive.
#include <vector>

#include "schedule.h"

namespace simt {

inline std::vector<Thread*> released;

// Waits for all threads; returns the number of threads whose predicate is not zero.
SIMT_UNWATCHED inline unsigned arrive(Barrier& barrier, const char* name, bool predicate = false) {
  const Thread& self = *scheduler.current;
  char* const order = barrier.order.now();
  release(order);
  scheduler.leave_thread();
  if (barrier.returned > 0) {
    scheduler.fail(text(self) + " is at " + name + ", which " + std::to_string(barrier.returned) +
                   " threads have missed by returning");
  }
  if (barrier.arrived == 0) {
    barrier.name = name;
    barrier.nonzero = 0;
  } else if (barrier.name != name) {
    scheduler.fail(text(self) + " is at " + name + ", others of the same barrier at " +
                   barrier.name);
  }
  barrier.nonzero += predicate;
  if (++barrier.arrived == barrier.threads) {
    barrier.arrived = 0;
    barrier.order.met();
    barrier.result = barrier.nonzero;
    released.clear();
    for (unsigned i = 0; i < barrier.threads; ++i) released.push_back(barrier.first + i);
    scheduler.release(released);
  }
  scheduler.wait(name);
  acquire(order);
  return barrier.result;
}

// Records that a thread has returned.
inline void leave(Barrier& barrier, const Thread& self) {
  ++barrier.returned;
  if (barrier.arrived > 0) {
    scheduler.fail(text(self) + " returned while " + std::to_string(barrier.arrived) +
                   " others wait for it at " + barrier.name);
  }
}

inline constexpr char kSyncThreads[] = "__syncthreads";
inline constexpr char kSyncThreadsOr[] = "__syncthreads_or";

inline Barrier& block_barrier() { return scheduler.current->block->barrier; }

}  // namespace simt

inline void __syncthreads() { simt::arrive(simt::block_barrier(), simt::kSyncThreads); }
inline int __syncthreads_or(int predicate) {
  return simt::arrive(simt::block_barrier(), simt::kSyncThreadsOr, predicate != 0) > 0;
}
