#pragma once
// NumPy's arrays as tensors, and what functions of the module take and return.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "host/tensor.h"

namespace specdec {

// Elements that are not aligned are copied.
Tensor tensor_of(const pybind11::array& array);

// An array of `dtype` over the memory of a DLPack capsule if this holds bfloat16, else None.
// NumPy's own from_dlpack does not read bfloat16.
pybind11::object bfloat16_from_dlpack(const pybind11::capsule& capsule,
                                      const pybind11::dtype& dtype);

}  // namespace specdec

namespace pybind11::detail {

template <>
struct type_caster<specdec::Tensor> {
  PYBIND11_TYPE_CASTER(specdec::Tensor, const_name("numpy.typing.NDArray[typing.Any]"));

  bool load(handle given, bool) {
    if (!isinstance<array>(given)) return false;
    value = specdec::tensor_of(reinterpret_borrow<array>(given));
    return true;
  }
  static handle cast(const specdec::Tensor& t, return_value_policy, handle) {
    return handle(static_cast<PyObject*>(t.owner())).inc_ref();
  }
};

}  // namespace pybind11::detail
