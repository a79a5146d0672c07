#pragma once
// Registration with PyTorch's dispatcher. Each file of csrc/torch/ops holds an op or a few: it
// validates the arguments, allocates the outputs, fills in the parameters that kernels take,
// launches the CPU or the CUDA kernel, and registers itself: the schema with
// STABLE_TORCH_LIBRARY_FRAGMENT, the function with SPECDEC_IMPLEMENT, and its validation alone as
// validate_<op>, for what is written in Python: the fake kernels under the public functions in
// specdec_kernels/ops, and the Triton provider that specdec_kernels/_library.py registers.
// A registered function takes tensors by value, because the boxing of the stable ABI does.
#include <torch/csrc/stable/library.h>

#include <string>
#include <type_traits>

#include "arguments/op.h"

// The namespace in torch.ops; the tests and kernels of a hub compile the same files under others.
#ifndef SPECDEC_LIBRARY
#define SPECDEC_LIBRARY specdec_kernels
#endif

// An op with kernels for the CPU only.
#define SPECDEC_IMPLEMENT_CPU(op) \
  STABLE_TORCH_LIBRARY_IMPL(SPECDEC_LIBRARY, CPU, m) { m.impl(#op, TORCH_BOX(&op)); }

// An op with kernels for the CPU and for CUDA. One function serves both: it launches the kernels of
// the device that its tensors are on.
#ifdef SPECDEC_WITH_CUDA
#define SPECDEC_IMPLEMENT(op) \
  SPECDEC_IMPLEMENT_CPU(op)   \
  STABLE_TORCH_LIBRARY_IMPL(SPECDEC_LIBRARY, CUDA, m) { m.impl(#op, TORCH_BOX(&op)); }
#else
#define SPECDEC_IMPLEMENT(op) SPECDEC_IMPLEMENT_CPU(op)
#endif

// A function for tensors on any device, fake ones too, or without tensors.
#define SPECDEC_IMPLEMENT_ANYWHERE(op)                                       \
  STABLE_TORCH_LIBRARY_IMPL(SPECDEC_LIBRARY, CompositeExplicitAutograd, m) { \
    m.impl(#op, TORCH_BOX(&op));                                             \
  }

// The validation of an op by a function that takes its arguments by reference.
#define SPECDEC_VALIDATE(op, function)                                         \
  STABLE_TORCH_LIBRARY_IMPL(SPECDEC_LIBRARY, CompositeExplicitAutograd, m) {   \
    m.impl("validate_" #op, TORCH_BOX((&::specdec::ByValue<function>::call))); \
  }

namespace specdec {

// Defines an op and its validation by the struct of its arguments. `outputs` as in a schema.
template <class Arguments, class Library>
void define(Library& library, const std::string& op, const std::string& outputs) {
  std::string arguments = Op<Arguments>::schema();
  library.def((op + arguments + " -> " + outputs).c_str());
  // Validation writes nothing.
  for (size_t at; (at = arguments.find("!)")) != std::string::npos;) arguments.erase(at - 2, 4);
  library.def(("validate_" + op + arguments + " -> ()").c_str());
}

template <auto function>
struct ByValue;
template <class Returned, class... P, Returned (*function)(P...)>
struct ByValue<function> {
  static void call(std::decay_t<P>... p) { function(p...); }
};

}  // namespace specdec
