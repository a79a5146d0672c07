#include "arguments/chain.h"
#include "torch/register.h"

namespace specdec {
namespace {

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "verify_chain(Tensor target, Tensor draft_token_ids, Tensor? draft, Tensor? draft_ids, "
      "Tensor? draft_columns, Tensor? draft_logsumexp, Tensor? draft_threshold, "
      "Tensor? draft_temperatures, float draft_temperature, int kind, int rule, "
      "Tensor? temperatures, float temperature, Tensor? top_ks, int top_k, Tensor? top_ps, "
      "float top_p, Tensor? min_ps, float min_p, Tensor seeds, Tensor positions, "
      "Tensor? target_indptr, Tensor? uniforms, float lenience, float typical_epsilon, "
      "float typical_delta, Tensor? synthetic_rates, Tensor? eos_token_ids, "
      "Tensor? max_new_tokens, bool with_logprobs, bool with_accept_probs) -> (Tensor tokens, "
      "Tensor num_accepted, "
      "Tensor status, Tensor logprobs, Tensor accept_probs)");
}
SPECDEC_IMPLEMENT(verify_chain)

}  // namespace
}  // namespace specdec
