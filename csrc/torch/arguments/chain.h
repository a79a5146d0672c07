#pragma once
// The arguments of verify_chain by name and their validation, with the messages of
// specdec_kernels/arguments/chain.py.
#include <tuple>

#include "specdec/chain.h"
#include "torch/arguments/verification.h"

namespace specdec {

using ChainOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct ChainArguments : VerifyArguments {
  double lenience;
  std::optional<Tensor> synthetic_rates;

  // Throws a message that names the argument, the rule and the value.
  void check() const;
  ChainOutputs new_outputs() const;
  // Pointers into these arguments, which become contiguous where kernels need it, and into `out`.
  ChainParams params(const ChainOutputs& out);

 private:
  Rule checked_rule() const { return enum_of("rule", rule, Rule::kSynthetic); }
  bool ragged_draft() const;
  void check_draft() const;
  void check_rule() const;
};

}  // namespace specdec
