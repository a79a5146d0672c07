#pragma once
// The arguments of verify_chain by name; specdec_kernels/_chain_arguments.py in C++.
#include <tuple>

#include "specdec/chain.h"
#include "torch/arguments/verification.h"

namespace specdec {

using ChainOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct ChainArguments : VerifyArguments {
  double lenience;
  std::optional<Tensor> synthetic_rates;

  // Throws what the user did wrong.
  void check() const;
  ChainOutputs new_outputs() const;
  // Pointers into these arguments, made dense where the kernels want it, and into `out`.
  ChainParams params(const ChainOutputs& out);

 private:
  bool ragged_draft() const;
  void check_draft() const;
  void check_rule() const;
};

}  // namespace specdec
