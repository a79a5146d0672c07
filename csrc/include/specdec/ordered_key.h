#pragma once
// Integers in the order of the floats they stand for: selection splits intervals of them.
#include <cstdint>
#include <cstring>

#include "specdec/host_device.h"

namespace specdec {

// Unsigned comparison of two keys is the comparison of their floats; a positive NaN is above all.
SPECDEC_HD inline uint32_t ordered_key(float value) {
  value += 0.0f;  // -0 becomes 0, because they tie
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

SPECDEC_HD inline float from_ordered_key(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key ^ 0x80000000u : ~key;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace specdec
