#pragma once
// The arguments of verify_tree by name; specdec_kernels/_tree_arguments.py in C++.
#include <tuple>

#include "specdec/tree.h"
#include "torch/arguments/verification.h"

namespace specdec {

using TreeOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct TreeArguments : VerifyArguments {
  Tensor parents;
  std::optional<Tensor> draft_rows;
  int64_t max_depth;

  // Throws what the user did wrong.
  void check() const;
  TreeOutputs new_outputs() const;
  // Pointers into these arguments, made dense where the kernels want it, and into `out`.
  TreeParams params(const TreeOutputs& out);

 private:
  bool flat_draft() const { return draft_source.rows && draft_source.rows->dim() == 2; }
  void check_parents() const;
  void check_draft() const;
};

}  // namespace specdec
