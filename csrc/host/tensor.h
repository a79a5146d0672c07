#pragma once
// NumPy's arrays as csrc/arguments reads and allocates them, with the names of PyTorch's interface.
// It needs the GIL to copy a tensor, to make one and to destroy it.
#include <cstdint>
#include <initializer_list>
#include <string>

#include "arguments/array.h"

namespace specdec {

using Tensor = Array;  // its owner is the NumPy array

std::string dtype_name(const Tensor& t);
// There is one device.
inline std::string device_name(const Tensor&) { return "cpu"; }
inline bool on_one_device(const Tensor&, const Tensor&) { return true; }

// Uninitialised.
Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype);
Tensor contiguous(const Tensor& t);
Tensor to_int64(const Tensor& t);  // a contiguous copy

}  // namespace specdec
