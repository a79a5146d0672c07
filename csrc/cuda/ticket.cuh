#pragma once
// Tickets: groups that share a row or a sequence count their arrivals, and the last one goes on
// alone. Arrivals are counted without a launch that clears the counter first: the upper 48 bits of
// a ticket are the id of the launch, and a word without it counts as zero, whatever memory held
// before.
#include "cuda/block_group.cuh"

namespace specdec::cuda {

// What other groups may be changing.
inline __device__ unsigned long long word_of(const unsigned long long* word) {
#ifdef __CUDACC__
  return *static_cast<const volatile unsigned long long*>(word);
#else
  return simt::relaxed_load(word);
#endif
}

// The memory order of an arrival, for the device and for the emulator: it releases what the threads
// wrote before the barrier in front of it, and acquires what earlier arrivals released.
#define SPECDEC_ARRIVAL "acq_rel"

inline __device__ unsigned long long add_arrival(unsigned long long* word) {
#ifdef __CUDACC__
  unsigned long long before;
  asm volatile("atom." SPECDEC_ARRIVAL ".gpu.global.add.u64 %0, [%1], 1;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return before;
#else
  return simt::atomic_add(SPECDEC_ARRIVAL, word, 1);
#endif
}
#undef SPECDEC_ARRIVAL

// Every group begins the count when it starts, long before it arrives; `seen` is what it then read.
// A swap that fails needs no answer, because only another group of the launch can have changed the
// word. For one thread of each block.
inline __device__ void begin_arrivals(const BlockGroup& group, unsigned long long* ticket,
                                      unsigned long long seen, uint64_t launch_id, unsigned count) {
  const bool begins = group.rank() == 0 && count > 1 && seen >> 16 != launch_id;
  if (begins) atomicCAS(ticket, seen, launch_id << 16);
}

// Whether this is the last of `count` arrivals: then what was written before the others is visible,
// and the ticket becomes zero, for a CUDA graph that replays the same launch.
inline __device__ bool arrive(unsigned long long* ticket, unsigned count) {
  if (count == 1) return true;
  if ((add_arrival(ticket) & 0xffff) + 1 != count) return false;
  atomicExch(ticket, 0);
  return true;
}

// Whether this group is the last of `count` to arrive; then what the others wrote is visible.
inline __device__ bool last_group(BlockGroup& group, unsigned long long* ticket, unsigned count) {
  group.sync();
  if (group.rank() == 0 && thread_id() == 0) {
    const bool last = arrive(ticket, count);
    for (unsigned r = 0; r < group.size(); ++r) *group.remote(&group.shared->last, r) = last;
  }
  group.sync();
  return group.shared->last != 0;
}

}  // namespace specdec::cuda
