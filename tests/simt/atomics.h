#pragma once
// Atomics: plain updates, because one thread runs at a time. Other threads may run before each.
#include "schedule.h"

namespace simt {

template <class T, class F>
T update(T* address, F f) {
  scheduler.observable();
  const T old = *address;
  *address = f(old);
  return old;
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
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { simt::scheduler.observable(4096); }
