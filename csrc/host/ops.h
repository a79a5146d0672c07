#pragma once
#include <pybind11/pybind11.h>

namespace specdec::host {

// Defines sample, verify_chain and verify_tree, and what belongs to them.
void define_ops(pybind11::module_& m);

}  // namespace specdec::host
