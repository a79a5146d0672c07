#pragma once
// Registration with PyTorch's dispatcher. Each file of csrc/torch/ops holds an op or a few: it
// validates the arguments, allocates the outputs, fills in the parameters that kernels take,
// launches the CPU or the CUDA kernel, and registers itself: the schema with
// STABLE_TORCH_LIBRARY_FRAGMENT, the function with SPECDEC_IMPLEMENT. It takes tensors
// by value, because the boxing of the stable ABI does. The fake kernels are under the public
// functions in specdec_kernels/ops, and specdec_kernels/_library.py registers the Triton provider.
#include <torch/csrc/stable/library.h>

// The namespace in torch.ops; the tests compile the same files under another one.
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

// A function without tensors, from which no dispatch key could be read.
#define SPECDEC_IMPLEMENT_ANYWHERE(op)                                       \
  STABLE_TORCH_LIBRARY_IMPL(SPECDEC_LIBRARY, CompositeExplicitAutograd, m) { \
    m.impl(#op, TORCH_BOX(&op));                                             \
  }
