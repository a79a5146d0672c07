#pragma once
// The results of an op: what it allocates, or what tensors of the caller must be.
#include "arguments/checks.h"

namespace specdec {

struct Output {
  static constexpr int64_t kVector = -1;

  const char* dims;  // the shape in words
  ScalarType dtype;
  int64_t rows;
  int64_t columns = kVector;  // kVector: the shape is [rows]
  bool wanted = true;         // allocated without entries, [0, 0], if not
};

}  // namespace specdec
