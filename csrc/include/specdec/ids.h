#pragma once
// Integers as ops read and write them: int32 or int64, whichever the caller has.
#include <cstdint>

#include "specdec/host_device.h"

namespace specdec {

// Numbers of any strides: [B, N], where `outer` is 0, or [B, K, L].
struct Ids {
  const void* data;
  bool are_int64;
  int64_t stride_sequence, stride_outer, stride_inner;

  SPECDEC_HD int64_t at(int64_t b, int64_t outer, int64_t inner) const {
    const int64_t i = b * stride_sequence + outer * stride_outer + inner * stride_inner;
    return are_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  SPECDEC_HD int64_t at(int64_t b, int64_t n) const { return at(b, 0, n); }
};

// A list of contiguous numbers, or none.
struct Integers {
  const void* data;
  bool are_int64;

  SPECDEC_HD bool given() const { return data != nullptr; }
  SPECDEC_HD int64_t operator[](int64_t i) const {
    return are_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// Contiguous numbers that an op writes.
struct IdsOut {
  void* data;
  bool are_int64;

  SPECDEC_HD void set(int64_t i, int64_t value) const {
    if (are_int64) {
      static_cast<int64_t*>(data)[i] = value;
    } else {
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
    }
  }
};

}  // namespace specdec
