#pragma once
// The results of an op: what it allocates, or what tensors of the caller must be.
#include <array>
#include <cstddef>
#include <tuple>

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

inline Tensor allocated(const Output& o, const Tensor& like) {
  if (!o.wanted) return new_empty(like, {0, 0}, o.dtype);
  if (o.columns == Output::kVector) return new_empty(like, {o.rows}, o.dtype);
  return new_empty(like, {o.rows, o.columns}, o.dtype);
}

// A tuple of tensors.
template <class Outputs, size_t n>
Outputs allocated(const std::array<Output, n>& outputs, const Tensor& like) {
  return std::apply([&](const auto&... each) { return Outputs{allocated(each, like)...}; },
                    outputs);
}

}  // namespace specdec
