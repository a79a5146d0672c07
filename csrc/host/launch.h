#pragma once
// Runs the CPU kernel of an op, without the GIL.
#include <pybind11/gil.h>

#include <optional>

#include "arguments/launchers.h"
#include "cpu/thread_count.h"
#include "host/tensor.h"

namespace specdec {

template <class OpParams>
void launch(const Tensor&, const OpParams& p, const Launchers<OpParams>& launchers,
            const std::optional<Tensor>& /*workspace*/ = std::nullopt) {
  const pybind11::gil_scoped_release unlocked;
  launchers.cpu(p, cpu::counted());
}

}  // namespace specdec
