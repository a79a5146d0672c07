#pragma once
// Where tensors that an op writes lie in memory.
#include <cstdint>
#include <string>
#include <vector>

#include "arguments/checks.h"

namespace specdec {

// The bytes from the first to the last element of a tensor; none, if it has no elements.
struct Extent {
  uintptr_t begin, end;
  bool dense;        // without gaps
  size_t index;      // of the tensor in its list
  int64_t expanded;  // a dimension of stride 0, or -1
};
using Extents = std::vector<Extent>;  // in the order of their addresses

// A tensor that is written must have a place of its own for each element.
void check_not_expanded(const char* name, const Tensor& t);
// The same for each tensor of a list. No two of them may begin at one address, and none may
// begin inside one without gaps. Views with gaps may lie in each other's gaps; whether they do is
// not checked, nor is anything of tensors without memory, as fake kernels have them.
Extents check_written(const char* name, const std::vector<Tensor>& tensors);
// The tensors, with a copy in place of each whose memory may overlap that of a written one. So an
// op reads all of its arguments before it writes.
std::vector<Tensor> read_first(const std::vector<Tensor>& tensors, const Extents& written);
Tensor read_first(const Tensor& t, const Tensor& written);

struct NamedTensor {
  std::string name;
  const Tensor* tensor;
};
// From the first to the last byte, no tensor that is written may overlap another of them, or one
// that is read. Without memory, as fake kernels have it, nothing is checked.
void check_apart(const std::vector<NamedTensor>& written, const std::vector<NamedTensor>& read);

}  // namespace specdec
