#pragma once
// Runs the CPU kernel of an op, without the GIL.
#include <pybind11/gil.h>

#include <optional>

#include "host/tensor.h"
#include "host/threads.h"

#define SPECDEC_LAUNCHERS(OpParams, op) (&cpu::op)

namespace specdec {

template <class OpParams>
void launch(const Tensor&, const OpParams& p, void (*kernel)(const OpParams&, const Parallel&),
            const std::optional<Tensor>& /*workspace*/) {
  const pybind11::gil_scoped_release unlocked;
  kernel(p, host_parallel());
}

}  // namespace specdec
