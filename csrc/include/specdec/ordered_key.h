#pragma once
// Integers in the order of the floats they stand for: selection splits intervals of them.
#include <cstdint>
#include <cstring>

#include "specdec/host_device.h"

namespace specdec {

// Unsigned comparison of two keys is the comparison of their floats, except that -0 is below 0; a
// positive NaN is above all.
SPECDEC_HD inline uint32_t ordered_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}

// The same with one key for both zeros, because they tie.
SPECDEC_HD inline uint32_t ordered_key(float value) { return ordered_bits(value + 0.0f); }

SPECDEC_HD inline float from_ordered_key(uint32_t key) {
  const uint32_t bits = key ^ (((key >> 31) - 1) | 0x80000000u);
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace specdec
