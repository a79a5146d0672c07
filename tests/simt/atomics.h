#pragma once
// Atomics: a load and a store, because one thread runs at a time. Other threads may run before
// each.
#include <cstring>

#include "schedule.h"

namespace simt {

// `order` is what PTX calls it: relaxed, acquire, release or acq_rel.
template <class T, class F>
T update(T* address, F f, const char* order = "relaxed") {
  scheduler.observable();
  const bool both = std::strcmp(order, "acq_rel") == 0;
  if (both || std::strcmp(order, "release") == 0 || scheduler.current->fenced) release(address);
  T old, next;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  next = f(old);
  __atomic_store(address, &next, __ATOMIC_RELAXED);
  if (both || std::strcmp(order, "acquire") == 0) acquire(address);
  scheduler.updated(address);  // which ends the effect of a fence
  return old;
}

inline unsigned long long atomic_add(const char* order, unsigned long long* address,
                                     unsigned long long value) {
  return update(address, [&](unsigned long long old) { return old + value; }, order);
}
inline unsigned long long relaxed_load(const unsigned long long* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

}  // namespace simt

#define SIMT_ATOMIC(name, T, expression)                                  \
  inline T name(T* address, T value) {                                    \
    return simt::update(address, [&](T old) -> T { return expression; }); \
  }
#define SIMT_ATOMIC_INTEGERS(name, expression) \
  SIMT_ATOMIC(name, int, expression)           \
  SIMT_ATOMIC(name, unsigned, expression)      \
  SIMT_ATOMIC(name, unsigned long long, expression)

// Sums of int are computed in unsigned, because they wrap on a device.
SIMT_ATOMIC(atomicAdd, int, static_cast<int>(static_cast<unsigned>(old) + value))
SIMT_ATOMIC(atomicAdd, unsigned, old + value)
SIMT_ATOMIC(atomicAdd, unsigned long long, old + value)
SIMT_ATOMIC(atomicAdd, float, old + value)
SIMT_ATOMIC(atomicAdd, double, old + value)
SIMT_ATOMIC(atomicSub, int, static_cast<int>(static_cast<unsigned>(old) - value))
SIMT_ATOMIC(atomicSub, unsigned, old - value)
SIMT_ATOMIC(atomicExch, float, (static_cast<void>(old), value))
SIMT_ATOMIC_INTEGERS(atomicExch, (static_cast<void>(old), value))
SIMT_ATOMIC_INTEGERS(atomicMax, old > value ? old : value)
SIMT_ATOMIC(atomicMax, long long, old > value ? old : value)
SIMT_ATOMIC_INTEGERS(atomicMin, old < value ? old : value)
SIMT_ATOMIC(atomicMin, long long, old < value ? old : value)
SIMT_ATOMIC_INTEGERS(atomicAnd, old& value)
SIMT_ATOMIC_INTEGERS(atomicOr, old | value)
SIMT_ATOMIC_INTEGERS(atomicXor, old ^ value)
SIMT_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
SIMT_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)

#undef SIMT_ATOMIC
#undef SIMT_ATOMIC_INTEGERS

#define SIMT_COMPARE_AND_SWAP(T)                                                       \
  inline T atomicCAS(T* address, T compare, T value) {                                 \
    return simt::update(address, [&](T old) { return old == compare ? value : old; }); \
  }
SIMT_COMPARE_AND_SWAP(int)
SIMT_COMPARE_AND_SWAP(unsigned)
SIMT_COMPARE_AND_SWAP(unsigned long long)
SIMT_COMPARE_AND_SWAP(unsigned short)
#undef SIMT_COMPARE_AND_SWAP

inline void __threadfence_block() {}
inline void __threadfence() { simt::scheduler.fence(); }
inline void __threadfence_system() { simt::scheduler.fence(); }
inline void __nanosleep(unsigned) { simt::scheduler.observable(4096); }
