#pragma once
// CUDA's intrinsics that concern one thread: bits, rounding and cached loads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace simt {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Hides a value from the compiler, so that it cannot fuse a product and a sum.
template <class T>
T opaque(T x) {
  asm("" : "+m"(x));
  return x;
}

}  // namespace simt

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

inline unsigned __float_as_uint(float x) { return simt::bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return simt::bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return simt::bits_as<float>(x); }
inline float __int_as_float(int x) { return simt::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return simt::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return simt::bits_as<double>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(uint64_t{x} * y >> 32);
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<unsigned long long>(static_cast<Wide>(x) * y >> 64);
}

inline float __fadd_rn(float x, float y) { return simt::opaque(x) + simt::opaque(y); }
inline float __fsub_rn(float x, float y) { return simt::opaque(x) - simt::opaque(y); }
inline float __fmul_rn(float x, float y) { return simt::opaque(x * y); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline double __dadd_rn(double x, double y) { return simt::opaque(x) + simt::opaque(y); }
inline double __dsub_rn(double x, double y) { return simt::opaque(x) - simt::opaque(y); }
inline double __dmul_rn(double x, double y) { return simt::opaque(x * y); }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __drcp_rn(double x) { return 1 / x; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return std::fma(x, y, z); }

inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float x, float y) { return x / y; }

// Rounds to nearest. Values out of range are undefined here; on a device they saturate.
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline long long __double2ll_rn(double x) { return static_cast<long long>(std::nearbyint(x)); }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T value) {
  *p = value;
}
template <class T>
void __stcg(T* p, T value) {
  *p = value;
}
