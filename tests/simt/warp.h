#pragma once
// Warp-wide operations: the lanes of a mask meet, and the last one computes every lane's result.
#include <cstring>
#include <type_traits>

#include "barrier.h"

namespace simt {

struct Collective {
  const char* name;
  uint64_t (*result)(const Warp&, uint32_t members, unsigned lane);
  bool orders = false;  // the memory accesses of those that meet
};

// Calls f(lane) for every bit.
template <class F>
void for_each_lane(uint32_t bits, F f) {
  for (; bits != 0; bits &= bits - 1) f(static_cast<unsigned>(__builtin_ctz(bits)));
}

inline uint64_t ballot_of(const Warp& warp, uint32_t members, unsigned) {
  uint32_t bits = 0;
  for_each_lane(members, [&](unsigned i) { bits |= uint32_t{warp.lanes[i].value != 0} << i; });
  return bits;
}

inline uint64_t shuffle_of(const Warp& warp, uint32_t members, unsigned lane) {
  const Warp::Lane& self = warp.lanes[lane];
  if (!(members >> self.source & 1)) {
    scheduler.fail(text(warp.first[lane]) + " reads lane " + std::to_string(self.source) + " in " +
                   self.what->name + ", which has returned or is not in the mask");
  }
  return warp.lanes[self.source].value;
}

template <class F>
uint64_t fold(const Warp& warp, uint32_t members, F f) {
  uint64_t sum = warp.lanes[__builtin_ctz(members)].value;
  for_each_lane(members & (members - 1), [&](unsigned i) { sum = f(sum, warp.lanes[i].value); });
  return sum;
}

inline constexpr Collective kSyncWarp = {
    "__syncwarp", [](const Warp&, uint32_t, unsigned) { return uint64_t{}; }, true};
inline constexpr Collective kShuffle = {"__shfl_sync", shuffle_of};
inline constexpr Collective kShuffleUp = {"__shfl_up_sync", shuffle_of};
inline constexpr Collective kShuffleXor = {"__shfl_xor_sync", shuffle_of};
inline constexpr Collective kBallot = {"__ballot_sync", ballot_of};
inline constexpr Collective kAny = {"__any_sync",
                                    [](const Warp& w, uint32_t members, unsigned lane) -> uint64_t {
                                      return ballot_of(w, members, lane) != 0;
                                    }};
inline constexpr Collective kAll = {"__all_sync",
                                    [](const Warp& w, uint32_t members, unsigned lane) -> uint64_t {
                                      return ballot_of(w, members, lane) == members;
                                    }};
inline constexpr Collective kReduceAdd = {
    "__reduce_add_sync", [](const Warp& w, uint32_t members, unsigned) {
      return fold(w, members, [](uint64_t a, uint64_t b) { return a + b; });
    }};
inline constexpr Collective kReduceMax = {
    "__reduce_max_sync", [](const Warp& w, uint32_t members, unsigned) {
      return fold(w, members, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
    }};

inline Warp& warp_of(const Thread& t) { return t.block->warps[t.rank / 32]; }

// Releases the lanes of a mask if all of them that have not returned have arrived.
inline void try_to_meet(Warp& warp, uint32_t mask) {
  const uint32_t members = mask & warp.alive;
  if (members == 0 || (members & ~warp.waiting) != 0) return;
  const Collective* const what = warp.lanes[__builtin_ctz(members)].what;
  bool same_mask = true;
  for_each_lane(members, [&](unsigned i) { same_mask &= warp.lanes[i].mask == mask; });
  if (!same_mask) return;
  for_each_lane(members, [&](unsigned i) {
    if (warp.lanes[i].what == what) return;
    scheduler.fail(text(warp.first[i]) + " is at " + warp.lanes[i].what->name +
                   ", others of its warp at " + what->name);
  });
  for_each_lane(members,
                [&](unsigned i) { warp.lanes[i].result = what->result(warp, members, i); });
  warp.waiting &= ~members;
  if (what->orders) warp.order.met();
  released.clear();
  for_each_lane(members, [&](unsigned i) { released.push_back(warp.first + i); });
  scheduler.release(released);
}

SIMT_UNWATCHED inline uint64_t meet(const Collective& what, uint32_t mask, uint64_t value = 0,
                                    unsigned source = 0) {
  const Thread& self = *scheduler.current;
  Warp& warp = warp_of(self);
  char* const order = what.orders ? warp.order.now() : nullptr;
  if (order) release(order);
  scheduler.leave_thread();
  const unsigned lane = self.rank % 32;
  if (!(mask >> lane & 1)) {
    scheduler.fail(text(self) + " is at " + what.name + " with a mask that leaves it out");
  }
  warp.lanes[lane] = {&what, mask, source, value, 0};
  warp.waiting |= 1u << lane;
  try_to_meet(warp, mask);
  scheduler.wait(what.name);
  if (order) acquire(order);
  return warp.lanes[lane].result;
}

// Records that a thread has returned, and releases lanes that waited for no other thread.
inline void leave(Warp& warp, const Thread& self) {
  warp.alive &= ~(1u << self.rank % 32);
  for (uint32_t left = warp.waiting; left != 0; left &= warp.waiting & (left - 1)) {
    try_to_meet(warp, warp.lanes[__builtin_ctz(left)].mask);
  }
}

template <class T>
T exchange(const Collective& what, unsigned mask, T value, unsigned source) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4 && sizeof(T) <= 8,
                "a shuffle moves 32 or 64 bits");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = meet(what, mask, bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline unsigned lane() { return scheduler.current->rank % 32; }

}  // namespace simt

inline void __syncwarp(unsigned mask = ~0u) { simt::meet(simt::kSyncWarp, mask); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return simt::exchange(simt::kShuffle, mask, value, static_cast<unsigned>(source) % 32);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const unsigned lane = simt::lane();
  return simt::exchange(simt::kShuffleUp, mask, value, delta > lane ? lane : lane - delta);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  const unsigned source = simt::lane() ^ static_cast<unsigned>(bits);
  return simt::exchange(simt::kShuffleXor, mask, value, source % 32);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(simt::meet(simt::kBallot, mask, predicate != 0));
}
inline int __any_sync(unsigned mask, int predicate) {
  return static_cast<int>(simt::meet(simt::kAny, mask, predicate != 0));
}
inline int __all_sync(unsigned mask, int predicate) {
  return static_cast<int>(simt::meet(simt::kAll, mask, predicate != 0));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  return static_cast<unsigned>(simt::meet(simt::kReduceAdd, mask, value));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return static_cast<unsigned>(simt::meet(simt::kReduceMax, mask, value));
}
