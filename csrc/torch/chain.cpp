#include "specdec/chain.h"

#include "torch/chain_arguments.h"
#include "torch/ops.h"
#include "torch/provider.h"

namespace specdec {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> verify_chain(
    Tensor target, Tensor draft_tokens, std::optional<Tensor> draft,
    std::optional<Tensor> draft_ids, std::optional<Tensor> draft_columns,
    std::optional<Tensor> draft_logsumexp, std::optional<Tensor> draft_threshold,
    std::optional<Tensor> draft_temperatures, double draft_temperature, std::string kind,
    std::string rule, std::optional<Tensor> temperatures, double temperature,
    std::optional<Tensor> top_ks, int64_t top_k, std::optional<Tensor> top_ps, double top_p,
    std::optional<Tensor> min_ps, double min_p, Tensor seeds, Tensor positions,
    std::optional<Tensor> cu_rows, std::optional<Tensor> uniforms, double lenience,
    double typical_epsilon, double typical_delta, std::optional<Tensor> synthetic_rates,
    std::optional<Tensor> eos_ids, std::optional<Tensor> max_emit, bool with_logprobs,
    bool with_acceptance) {
  ChainArguments a{{target,
                    draft_tokens,
                    {draft, draft_ids, draft_columns, draft_logsumexp, draft_threshold,
                     draft_temperatures, draft_temperature},
                    kind,
                    rule,
                    {temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p},
                    seeds,
                    positions,
                    cu_rows,
                    uniforms,
                    typical_epsilon,
                    typical_delta,
                    eos_ids,
                    max_emit,
                    with_logprobs,
                    with_acceptance},
                   lenience,
                   synthetic_rates};
  a.check();
  const ChainOutputs out = a.new_outputs();
  run_where<ChainParams>(target, a.params(out), SPECDEC_LAUNCHERS(verify_chain));
  return out;
}

}  // namespace specdec
