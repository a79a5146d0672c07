#pragma once
// The arguments of verify_tree by name and their validation, with the messages of
// specdec_kernels/arguments/tree.py.
#include <tuple>

#include "specdec/tree.h"
#include "torch/arguments/verification.h"

namespace specdec {

using TreeOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct TreeArguments : VerifyArguments {
  Tensor parents;
  std::optional<Tensor> draft_rows;
  int64_t max_depth;

  // Throws a message that names the argument, the rule and the value.
  void check() const;
  TreeOutputs new_outputs() const;
  // Pointers into these arguments, which become contiguous where kernels need it, and into `out`.
  TreeParams params(const TreeOutputs& out);

 private:
  TreeRule checked_rule() const { return enum_of("rule", rule, TreeRule::kTypical); }
  bool flat_draft() const { return draft_arguments.rows && draft_arguments.rows->dim() == 2; }
  void check_parents() const;
  void check_draft() const;
};

}  // namespace specdec
