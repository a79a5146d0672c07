#pragma once
// The arguments of verify_tree by name and their validation.
#include <array>
#include <tuple>

#include "arguments/verification.h"
#include "specdec/tree.h"

namespace specdec {

using TreeOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct TreeArguments : VerifyArguments {
  using Outputs = TreeOutputs;
  static constexpr std::array kOutputs = {"path",   "tokens",   "num_accepted",
                                          "status", "logprobs", "accept_probs"};

  Tensor parents;
  int64_t max_depth;
  TreeParams of_rules;  // its fields of `kParameters`

  auto arguments() {
    return std::tuple_cat(
        std::make_tuple(argument("target", target), argument("tree_tokens", drafted),
                        argument("parents", parents)),
        draft_arguments.arguments(), arguments_of_both(), rule_arguments(of_rules, kParameters),
        limits(), std::make_tuple(argument("max_depth", max_depth, "SymInt")), wanted_outputs());
  }
  void set_defaults() { of_rules = default_parameters<TreeParams>(kParameters); }
  // Throws a message that names the argument, the rule and the value.
  void check() const;
  std::array<Output, kOutputs.size()> outputs() const;
  // Pointers into these arguments, which become contiguous where kernels need it, and into `out`.
  TreeParams params(const TreeOutputs& out);
  // The op.
  TreeOutputs run();
  // As that of ChainArguments.
  void run_into(const TreeOutputs& out, const std::optional<Tensor>& workspace = {});

 private:
  static constexpr auto kParameters = typical_parameters<TreeParams, TreeRule>();
  TreeRule checked_rule() const { return enum_of("rule", rule, TreeRule::kTypical); }
  void check_parents() const;
  void check_draft(const Names& names) const;
};

}  // namespace specdec
