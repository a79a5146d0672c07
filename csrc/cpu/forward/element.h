#pragma once
// Numbers of the three dtypes as registers of floats, and functions of them. As float_register.h,
// only files that are compiled once per instruction set include it.
#include <cstddef>

#include "cpu/forward/float_register.h"

namespace specdec::cpu {
namespace {

struct Float32 {
  using Element = float;
  static V widen(const float* p) { return load<V>(p); }
  static void narrow(V v, float* out) { store(out, v); }
};

struct BFloat16 {
  using Element = uint16_t;
  static V widen(const uint16_t* p) { return from_bfloat16(p); }
  static void narrow(V v, uint16_t* out) { to_bfloat16(v, out); }
};

struct Float16 {
  using Element = uint16_t;
  static V widen(const uint16_t* p) { return from_float16(p); }
  static void narrow(V v, uint16_t* out) { to_float16(v, out); }
};

// The last n numbers of a vector, and zeros.
template <class Type>
V widen_part(const typename Type::Element* p, int64_t n) {
  typename Type::Element lanes[kLanes] = {};
  __builtin_memcpy(lanes, p, static_cast<size_t>(n) * sizeof *p);
  return Type::widen(lanes);
}

template <class Type>
V widen_up_to(const typename Type::Element* p, int64_t n) {
  return n >= kLanes ? Type::widen(p) : widen_part<Type>(p, n);
}

// e^x for x <= 0, and for x up to 80; 0 where it would be subnormal.
inline V exponential(V x) {
  const V magic = V{} + 0x1.8p23f;  // adding it rounds to an integer
  const V shifted = multiply_add(x, V{} + 0x1.715476p0f, magic), power = shifted - magic;
  V rest = multiply_add(power, V{} - 0.693359375f, x);
  rest = multiply_add(power, V{} + 2.12194440e-4f, rest);
  V sum = V{} + 1.9875691500e-4f;
  sum = multiply_add(sum, rest, V{} + 1.3981999507e-3f);
  sum = multiply_add(sum, rest, V{} + 8.3334519073e-3f);
  sum = multiply_add(sum, rest, V{} + 4.1665795894e-2f);
  sum = multiply_add(sum, rest, V{} + 1.6666665459e-1f);
  sum = multiply_add(sum, rest, V{} + 5.0000001201e-1f);
  sum = multiply_add(sum, rest * rest, rest + 1.0f);
  const V result = sum * (V)(((U)shifted << 23) + 0x3f800000u);
  return x < V{} - 87.3f ? V{} : result;
}

// As the Cephes library computes it, to about two units in the last place.
inline V hyperbolic_tangent(V x) {
  const V magnitude = (V)((U)x & 0x7fffffffu), square = x * x;
  V sum = V{} - 5.70498872745e-3f;
  sum = multiply_add(sum, square, V{} + 2.06390887954e-2f);
  sum = multiply_add(sum, square, V{} - 5.37397155531e-2f);
  sum = multiply_add(sum, square, V{} + 1.33314422036e-1f);
  sum = multiply_add(sum, square, V{} - 3.33332819422e-1f);
  const V small = multiply_add(sum * square, x, x);
  const V limited = magnitude > 20.0f ? V{} + 20.0f : magnitude;
  const V large = 1.0f - 2.0f / (exponential(limited + limited) + 1.0f);
  return magnitude < 0.625f ? small : (V)((U)large | ((U)x & 0x80000000u));
}

}  // namespace
}  // namespace specdec::cpu
