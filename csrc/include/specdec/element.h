#pragma once
// Single entries of rows, read and written as floats.
#include <cstdint>
#include <cstring>

#include "specdec/host_device.h"
#include "specdec/sampling.h"

namespace specdec {

SPECDEC_HD inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
SPECDEC_HD inline float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Rounded to the nearest, ties to even.
SPECDEC_HD inline uint16_t bfloat16_of(float x) {
  const uint32_t bits = bits_of_float(x);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

SPECDEC_HD inline uint16_t float16_of(float x) {
  const uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000u,
                 magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00;
  } else if (magnitude >= 0x47800000u) {
    half = 0x7c00;
  } else if (magnitude < 0x38800000u) {
    // The sum with 1/2 rounds to units of the smallest subnormal.
    half = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

SPECDEC_HD inline float float_of_float16(uint16_t h) {
  const float magnitude = float_of_bits((h & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
  return float_of_bits(bits_of_float(magnitude) | special | (h & 0x8000u) << 16);
}

SPECDEC_HD inline float element(const void* row, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(row)[i];
  const uint16_t h = static_cast<const uint16_t*>(row)[i];
  return dtype == DType::kBFloat16 ? float_of_bits(uint32_t{h} << 16) : float_of_float16(h);
}

SPECDEC_HD inline void set_element(void* row, DType dtype, int64_t i, float x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(row)[i] = x;
  } else {
    static_cast<uint16_t*>(row)[i] = dtype == DType::kBFloat16 ? bfloat16_of(x) : float16_of(x);
  }
}

}  // namespace specdec
