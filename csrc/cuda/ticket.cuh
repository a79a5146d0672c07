#pragma once
// Tickets: blocks that share a row or a sequence count their arrivals, and the last one finishes
// it. No block waits for another. Arrivals are counted without a launch that clears the counter
// first: the upper 48 bits of a word are the id of the launch, and a word without it counts as
// zero, whatever memory held before.
#include "cuda/thread_block.cuh"

namespace specdec::cuda {

// The memory order of an arrival, for the device and for the emulator: it releases what the threads
// wrote before the barrier in front of it, and acquires what earlier arrivals released.
#define SPECDEC_ARRIVAL "acq_rel"

inline __device__ unsigned long long add_arrival(unsigned long long* word,
                                                 unsigned long long count) {
#ifdef __CUDACC__
  unsigned long long before;
  asm volatile("atom." SPECDEC_ARRIVAL ".gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(word)), "l"(count)
               : "memory");
  return before;
#else
  return simt::atomic_add(SPECDEC_ARRIVAL, word, count);
#endif
}
#undef SPECDEC_ARRIVAL

constexpr int kMostArrivals = 255;  // that a ticket counts

// Every block begins the count some time before it arrives. A swap that fails needs no answer,
// because only another block of the launch can have changed the word. For one thread.
inline __device__ void begin_arrivals(unsigned long long* ticket, uint64_t launch_id,
                                      unsigned count) {
  if (count == 1) return;
  const unsigned long long seen = peek(ticket);
  if (seen >> 16 != launch_id)
    atomicCAS(ticket, seen, static_cast<unsigned long long>(launch_id) << 16);
}

struct Arrival {
  bool last;     // of all: what the others wrote before they arrived is visible
  bool skipped;  // one of them has not done its part
};

// One of `count` arrivals. `skips` says that this block has not done its part. The last one makes
// the ticket zero, for a CUDA graph that replays the same launch. For one thread.
inline __device__ Arrival arrive(unsigned long long* ticket, unsigned count, bool skips) {
  if (count == 1) return {true, skips};
  const unsigned long long before = add_arrival(ticket, skips ? 0x101 : 1);
  if ((before & 0xff) + 1 != count) return {false, skips};
  atomicExch(ticket, 0);
  return {true, skips || (before >> 8 & 0xff) != 0};
}

// The same by a whole block, for what all of its threads did; in every thread. `shared` lies in
// shared memory.
inline __device__ Arrival arrive(Arrival& shared, unsigned long long* ticket, unsigned count,
                                 bool skips) {
  __syncthreads();
  if (thread_id() == 0) shared = arrive(ticket, count, skips);
  __syncthreads();
  return shared;
}

// A number below 0xffff that blocks of a launch lower, in a word like a ticket; 0xffff at first.
constexpr int kNoLimit = 0xffff;

inline __device__ int limit_of(const unsigned long long* word, uint64_t launch_id) {
  const unsigned long long seen = peek(word);
  return seen >> 16 == launch_id ? static_cast<int>(seen & 0xffff) : kNoLimit;
}

inline __device__ void lower_limit(unsigned long long* word, uint64_t launch_id, int64_t limit) {
  if (limit >= kNoLimit) return;
  const auto wanted =
      static_cast<unsigned long long>(launch_id << 16 | static_cast<uint64_t>(limit));
  unsigned long long seen = peek(word);
  while (seen >> 16 != launch_id || seen > wanted) {
    const unsigned long long before = atomicCAS(word, seen, wanted);
    if (before == seen) return;
    seen = before;
  }
}

}  // namespace specdec::cuda
