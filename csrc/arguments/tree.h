#pragma once
// The arguments of verify_tree by name and their validation.
#include <tuple>

#include "arguments/verification.h"
#include "specdec/tree.h"

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
  // The op.
  TreeOutputs run();

 private:
  TreeRule checked_rule() const { return enum_of("rule", rule, TreeRule::kTypical); }
  bool flat_draft() const { return draft_arguments.rows && draft_arguments.rows->dim() == 2; }
  void check_parents() const;
  void check_draft() const;
};

// In the order of the schema.
TreeArguments tree_arguments(
    Tensor target, Tensor tree_tokens, Tensor parents, std::optional<Tensor> draft,
    std::optional<Tensor> draft_ids, std::optional<Tensor> draft_columns,
    std::optional<Tensor> draft_logsumexp, std::optional<Tensor> draft_threshold,
    std::optional<Tensor> draft_temperatures, double draft_temperature,
    std::optional<Tensor> draft_rows, int64_t kind, int64_t rule,
    std::optional<Tensor> temperatures, double temperature, std::optional<Tensor> top_ks,
    int64_t top_k, std::optional<Tensor> top_ps, double top_p, std::optional<Tensor> min_ps,
    double min_p, Tensor seeds, Tensor positions, std::optional<Tensor> target_indptr,
    std::optional<Tensor> uniforms, double typical_epsilon, double typical_delta,
    std::optional<Tensor> eos_token_ids, std::optional<Tensor> max_new_tokens, int64_t max_depth,
    bool with_logprobs, bool with_accept_probs);

}  // namespace specdec
