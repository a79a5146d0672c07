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
  if (both || std::strcmp(order, "release") == 0) release(address);
  T old, next;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  next = f(old);
  __atomic_store(address, &next, __ATOMIC_RELAXED);
  if (both || std::strcmp(order, "acquire") == 0) acquire(address);
  return old;
}

inline unsigned long long atomic_add(const char* order, unsigned long long* address,
                                     unsigned long long value) {
  return update(address, [&](unsigned long long old) { return old + value; }, order);
}
template <class T>
T relaxed_load(const T* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

}  // namespace simt

inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return simt::update(address, [&](unsigned old) { return old + value; });
}
inline unsigned atomicExch(unsigned* address, unsigned value) {
  return simt::update(address, [&](unsigned) { return value; });
}
inline unsigned long long atomicExch(unsigned long long* address, unsigned long long value) {
  return simt::update(address, [&](unsigned long long) { return value; });
}
inline unsigned long long atomicCAS(unsigned long long* address, unsigned long long compare,
                                    unsigned long long value) {
  return simt::update(address,
                      [&](unsigned long long old) { return old == compare ? value : old; });
}
