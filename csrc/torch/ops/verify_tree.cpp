#include "specdec/tree.h"
#include "torch/arguments/tree.h"
#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> verify_tree(
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
    bool with_logprobs, bool with_accept_probs) {
  TreeArguments a{{target,
                   tree_tokens,
                   {draft, draft_ids, draft_columns, draft_logsumexp, draft_threshold,
                    draft_temperatures, draft_temperature},
                   kind,
                   rule,
                   {temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p},
                   seeds,
                   positions,
                   target_indptr,
                   uniforms,
                   typical_epsilon,
                   typical_delta,
                   eos_token_ids,
                   max_new_tokens,
                   with_logprobs,
                   with_accept_probs},
                  parents,
                  draft_rows,
                  max_depth};
  a.check();
  const TreeOutputs out = a.new_outputs();
  launch(target, a.params(out), SPECDEC_LAUNCHERS(TreeParams, verify_tree));
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "verify_tree(Tensor target, Tensor tree_tokens, Tensor parents, Tensor? draft, "
      "Tensor? draft_ids, Tensor? draft_columns, Tensor? draft_logsumexp, Tensor? draft_threshold, "
      "Tensor? draft_temperatures, float draft_temperature, Tensor? draft_rows, int kind, "
      "int rule, Tensor? temperatures, float temperature, Tensor? top_ks, int top_k, Tensor? "
      "top_ps, "
      "float top_p, Tensor? min_ps, float min_p, Tensor seeds, Tensor positions, "
      "Tensor? target_indptr, Tensor? uniforms, float typical_epsilon, float typical_delta, "
      "Tensor? eos_token_ids, Tensor? max_new_tokens, SymInt max_depth, bool with_logprobs, "
      "bool with_accept_probs) -> (Tensor path, Tensor tokens, Tensor num_accepted, Tensor status, "
      "Tensor logprobs, "
      "Tensor accept_probs)");
}
SPECDEC_IMPLEMENT(verify_tree)

}  // namespace
}  // namespace specdec
