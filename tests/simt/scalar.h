#pragma once
// CUDA's intrinsics that concern one thread: bits, rounding and cached loads.
#include <cmath>
#include <cstdint>

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }

template <class T>
T __ldg(const T* p) {
  return *p;
}
