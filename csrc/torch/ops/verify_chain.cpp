#include "arguments/chain.h"
#include "torch/register.h"

namespace specdec {
namespace {

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  const std::string arguments =
      "(Tensor target, Tensor draft_token_ids, Tensor? draft, Tensor? draft_ids, Tensor? "
      "draft_columns, Tensor? draft_logsumexp, Tensor? draft_threshold, Tensor? "
      "draft_temperatures, float draft_temperature, int kind, int rule, Tensor? temperatures, "
      "float temperature, Tensor? top_ks, int top_k, Tensor? top_ps, float top_p, Tensor? min_ps,"
      " float min_p, Tensor seeds, Tensor positions, Tensor? target_indptr, Tensor? uniforms, "
      "float lenience, float typical_epsilon, float typical_delta, int top_beta_rank, float "
      "top_beta_distance, Tensor? synthetic_rates, Tensor? eos_token_ids, Tensor? max_new_tokens, "
      "bool with_logprobs, bool with_accept_probs)";
  m.def(("verify_chain" + arguments +
         " -> (Tensor tokens, Tensor num_accepted, Tensor status, Tensor logprobs, Tensor "
         "accept_probs)")
            .c_str());
  m.def(("validate_verify_chain" + arguments + " -> ()").c_str());
}
constexpr auto& verify_chain = Op<chain_arguments>::run;
SPECDEC_IMPLEMENT(verify_chain)
SPECDEC_VALIDATE(verify_chain, Op<chain_arguments>::validate)

}  // namespace
}  // namespace specdec
