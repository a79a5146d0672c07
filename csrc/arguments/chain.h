#pragma once
// The arguments of verify_chain by name and their validation.
#include <tuple>

#include "arguments/verification.h"
#include "specdec/chain.h"

namespace specdec {

using ChainOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct ChainArguments : VerifyArguments {
  double lenience;
  int64_t top_beta_rank;
  double top_beta_distance;
  std::optional<Tensor> synthetic_rates;

  // Throws a message that names the argument, the rule and the value.
  void check() const;
  ChainOutputs new_outputs() const;
  // Pointers into these arguments, which become contiguous where kernels need it, and into `out`.
  ChainParams params(const ChainOutputs& out);
  // The op.
  ChainOutputs run();

 private:
  Rule checked_rule() const { return enum_of("rule", rule, Rule::kTopBeta); }
  bool ragged_draft() const;
  void check_draft() const;
  void check_rule() const;
};

// In the order of the schema.
ChainArguments chain_arguments(
    Tensor target, Tensor draft_token_ids, std::optional<Tensor> draft,
    std::optional<Tensor> draft_ids, std::optional<Tensor> draft_columns,
    std::optional<Tensor> draft_logsumexp, std::optional<Tensor> draft_threshold,
    std::optional<Tensor> draft_temperatures, double draft_temperature, int64_t kind, int64_t rule,
    std::optional<Tensor> temperatures, double temperature, std::optional<Tensor> top_ks,
    int64_t top_k, std::optional<Tensor> top_ps, double top_p, std::optional<Tensor> min_ps,
    double min_p, Tensor seeds, Tensor positions, std::optional<Tensor> target_indptr,
    std::optional<Tensor> uniforms, double lenience, double typical_epsilon, double typical_delta,
    int64_t top_beta_rank, double top_beta_distance, std::optional<Tensor> synthetic_rates,
    std::optional<Tensor> eos_token_ids, std::optional<Tensor> max_new_tokens, bool with_logprobs,
    bool with_accept_probs);

}  // namespace specdec
