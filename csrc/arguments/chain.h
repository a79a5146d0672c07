#pragma once
// The arguments of verify_chain by name and their validation.
#include <array>
#include <tuple>

#include "arguments/verification.h"
#include "specdec/chain.h"

namespace specdec {

using ChainOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct ChainArguments : VerifyArguments {
  using Outputs = ChainOutputs;
  static constexpr std::array kOutputs = {"tokens", "num_accepted", "status", "logprobs",
                                          "accept_probs"};

  ChainParams of_rules;  // its fields of `kParameters`
  std::optional<Tensor> synthetic_rates;

  auto arguments() {
    return std::tuple_cat(
        std::make_tuple(argument("target", target), argument("draft_token_ids", drafted)),
        draft_arguments.arguments(), arguments_of_both(), rule_arguments(of_rules, kParameters),
        std::make_tuple(argument("synthetic_rates", synthetic_rates)), limits(), wanted_outputs());
  }
  void set_defaults() { of_rules = default_parameters<ChainParams>(kParameters); }
  // Throws a message that names the argument, the rule and the value.
  void check() const;
  std::array<Output, kOutputs.size()> outputs() const;
  // Pointers into these arguments, which become contiguous where kernels need it, and into `out`.
  ChainParams params(const ChainOutputs& out);
  // The op.
  ChainOutputs run();
  // Writes the results into `out`, where those that nobody asked for may be undefined. CUDA kernels
  // work in memory that is allocated, if there is no workspace.
  void run_into(const ChainOutputs& out, const std::optional<Tensor>& workspace = {});

 private:
  template <class T>
  using Parameter = RuleParameter<ChainParams, T, Rule>;
  static constexpr auto kParameters = std::tuple_cat(
      std::make_tuple(Parameter<float>{&ChainParams::lenience, "lenience", 1, "in (0, 1]",
                                       [](float x) { return 0 < x && x <= 1; }, Rule::kLenient,
                                       "lenient"}),
      typical_parameters<ChainParams, Rule>(),
      std::make_tuple(
          Parameter<int64_t>{&ChainParams::top_beta_rank, "top_beta_rank", 1, "at least 1",
                             [](int64_t x) { return x >= 1; }, Rule::kTopBeta, "top_beta"},
          Parameter<float>{&ChainParams::top_beta_distance, "top_beta_distance", 0, "at least 0",
                           [](float x) { return x >= 0; }, Rule::kTopBeta, "top_beta"}));

  Rule checked_rule() const { return enum_of("rule", rule, kLastRule); }
  void check_draft(const Names& names) const;
  void check_rule() const;
};

}  // namespace specdec
