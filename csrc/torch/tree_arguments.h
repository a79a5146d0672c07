#pragma once
// The arguments of verify_tree by name; specdec_kernels/_tree_arguments.py in C++.
#include <optional>
#include <string>
#include <tuple>

#include "specdec/tree.h"
#include "torch/draft_arguments.h"

namespace specdec {

using TreeOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct TreeArguments {
  Tensor target, tokens, parents;
  DraftArguments law;
  std::optional<Tensor> draft_rows;
  std::string kind, rule;
  SamplingArgs sampling;
  Tensor seeds, positions;
  std::optional<Tensor> cu_rows, uniforms;
  double typical_epsilon, typical_delta;
  std::optional<Tensor> eos_ids, max_emit;
  int64_t max_depth;
  bool with_logprobs, with_acceptance;

  // Throws what the user did wrong.
  void check() const;
  TreeOutputs new_outputs() const;
  // Pointers into these arguments, made dense where the kernels want it, and into `out`.
  TreeParams params(const TreeOutputs& out);

 private:
  bool flat_draft() const { return law.rows && law.rows->dim() == 2; }
  void check_tree() const;
  void check_target() const;
  void check_draft() const;
  void check_uniforms() const;
  void check_rule() const;
};

}  // namespace specdec
