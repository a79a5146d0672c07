#pragma once
// One register of floats, and the few instructions that the compiler's vectors do not express. Only
// files that are compiled once per instruction set include it, and all of it has internal linkage.
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace specdec::cpu {
namespace {

#if defined(__AVX512DQ__)
constexpr int kRegister = 64, kBlockRows = 12;  // bytes; rows whose sums fit in the registers
#elif defined(__AVX2__)
constexpr int kRegister = 32, kBlockRows = 6;
#else
constexpr int kRegister = 16, kBlockRows = 4;
#endif
constexpr int kLanes = kRegister / 4;
constexpr int kWidth = 2 * kLanes;  // two independent sums of a row hide the latency of an addition

typedef float V __attribute__((vector_size(kRegister)));
typedef uint32_t U __attribute__((vector_size(kRegister)));
typedef uint16_t H __attribute__((vector_size(kRegister / 2)));

template <class T>
inline T load(const void* p) {
  T v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
inline void store(void* p, const T& v) {
  __builtin_memcpy(p, &v, sizeof v);
}

inline V every_lane(float x) {
#if defined(__AVX512DQ__)
  return (V)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (V)_mm256_set1_ps(x);
#else
  return V{x, x, x, x};
#endif
}

// a * b + c. It is spelt out, because the compiler's contraction may depend on the number of rows.
inline V multiply_add(V a, V b, V c) {
#if defined(__AVX512DQ__)
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline V from_float16(const uint16_t* p) {
#if defined(__AVX512DQ__)
  // The unmasked form trips -Wmaybe-uninitialized in GCC 12.
  return (V)_mm512_maskz_cvtph_ps(0xffff, load<__m256i>(p));
#elif defined(__AVX2__)
  return (V)_mm256_cvtph_ps(load<__m128i>(p));
#else
  const U h = __builtin_convertvector(load<H>(p), U);
  // The multiplication corrects the bias of the exponent, also for subnormals.
  const V magnitude = (V)((h & 0x7fffu) << 13) * 0x1p112f;
  const U special = (U)((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return (V)((U)magnitude | special | ((h & 0x8000u) << 16));
#endif
}

// Rounds to the nearest, ties to even.
inline void to_float16(V v, uint16_t* out) {
#if defined(__AVX512DQ__)
  store(out, _mm512_maskz_cvtps_ph(0xffff, (__m512)v, 0));
#elif defined(__AVX2__)
  store(out, _mm256_cvtps_ph((__m256)v, 0));
#else
  const U bits = (U)v, magnitude = bits & 0x7fffffffu;
  // Adding half moves the last bit of a subnormal result to the end of the mantissa.
  const U subnormal = (U)((V)magnitude + 0.5f) - 0x3f000000u;
  const U normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
  const U finite = magnitude < 0x38800000u ? subnormal : normal;
  const U overflow = magnitude > 0x7f800000u ? U{} + 0x7e00u : U{} + 0x7c00u;
  const U rounded = magnitude >= 0x477ff000u ? overflow : finite;
  store(out, __builtin_convertvector(rounded | (bits >> 16 & 0x8000u), H));
#endif
}

inline V from_bfloat16(const uint16_t* p) {
  return (V)(__builtin_convertvector(load<H>(p), U) << 16);
}

inline void to_bfloat16(V v, uint16_t* out) {
  const U bits = (U)v;
  const U rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const U nan = U{} + 0x7fc0u;
  store(out, __builtin_convertvector(v == v ? rounded : nan, H));
}

}  // namespace
}  // namespace specdec::cpu
