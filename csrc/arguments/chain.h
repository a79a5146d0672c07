#pragma once
// The arguments of verify_chain by name and their validation.
#include <tuple>

#include "arguments/verification.h"
#include "specdec/chain.h"

namespace specdec {

using ChainOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct ChainArguments : VerifyArguments {
  double lenience;
  int64_t top_beta_rank;
  double top_beta_distance;
  std::optional<Tensor> synthetic_rates;

  auto arguments() {
    return std::tuple_cat(
        std::make_tuple(argument("target", target), argument("draft_token_ids", drafted)),
        draft_arguments.arguments(), arguments_of_both(),
        std::make_tuple(argument("lenience", lenience)), typical_arguments(),
        std::make_tuple(argument("top_beta_rank", top_beta_rank),
                        argument("top_beta_distance", top_beta_distance),
                        argument("synthetic_rates", synthetic_rates)),
        limits(), wanted_outputs());
  }
  // Throws a message that names the argument, the rule and the value.
  void check() const;
  ChainOutputs new_outputs() const;
  // Pointers into these arguments, which become contiguous where kernels need it, and into `out`.
  ChainParams params(const ChainOutputs& out);
  // The op.
  ChainOutputs run();

 private:
  Rule checked_rule() const { return enum_of("rule", rule, Rule::kTopBeta); }
  bool ragged_draft() const;
  void check_draft() const;
  void check_rule() const;
};

}  // namespace specdec
