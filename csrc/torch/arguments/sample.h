#pragma once
// The arguments of sample by name and their validation, with the messages of
// specdec_kernels/arguments/sample.py.
#include <string>
#include <tuple>

#include "specdec/sample.h"
#include "torch/arguments/checks.h"

namespace specdec {

using SampleOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct SampleArguments {
  Tensor logits;
  SamplingArguments sampling;
  Tensor seeds, positions;
  std::string noise, method;

  // Throws a message that names the argument, the rule and the value.
  void check() const;
  SampleOutputs new_outputs() const;
  // Pointers into these arguments, which become contiguous where kernels need it, and into `out`.
  SampleParams params(const SampleOutputs& out);
};

}  // namespace specdec
