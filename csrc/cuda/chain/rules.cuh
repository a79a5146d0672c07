#pragma once
// Rules that test a drafted token by P alone, or not at all. See docs/rules.md.
#include "cuda/chain/decide.cuh"

namespace specdec::cuda {

template <Variant kVariant>
__device__ void ChainVerifier<kVariant>::decide_otherwise() {
  if (rule_is(Rule::kSynthetic)) return accepts_at_rate() ? accept(drafted_logprob()) : draw_p();
  // Weights are rounded, so that P of the only survivor may be a little above 1, and so any bound.
  t_.p_x = fmin(1.0, exp_of(drafted_logprob()));
  if (!typical_needs_entropy(t_.p_x, p_.typical_epsilon)) return accept_or_draw(t_.p_x > 0);
  t_.action = Action::kEntropy;
}

// Rule synthetic, at every temperature.
template <Variant kVariant>
__device__ bool ChainVerifier<kVariant>::accepts_at_rate() const {
  return record(accept_at_rate(accept_uniform(p_, t_, t_.i), p_.synthetic_rates[t_.i]));
}

template <Variant kVariant>
__device__ void ChainVerifier<kVariant>::decide_typical() {
  accept_or_draw(t_.p_x > typical_bound(p_.typical_epsilon, p_.typical_delta, t_.found));
}

// Rule top_beta. At temperature 0 P is that of temperature 1 without filters.
template <Variant kVariant>
__device__ void ChainVerifier<kVariant>::begin_top_beta() {
  const bool near =
      within_top_distance(t_.entry, t_.stats.max, t_.greedy ? 1 : t_.stats.inv_t,
                          p_.top_beta_distance, p_.kind == Kind::kProbs && t_.greedy) &&
      (t_.greedy || drafted_logprob() > -INFINITY);
  if (!near || t_.entry == t_.stats.max) return decide_top_beta(near);
  t_.action = Action::kCount;
}

template <Variant kVariant>
__device__ void ChainVerifier<kVariant>::decide_top_beta(bool accepted) {
  if (!t_.greedy) return accept_or_draw(accepted);
  record_accept_prob(t_.i, accepted);
  if (accepted) return accept(0.0);
  write(t_.i, t_.token, 0.0);
  finish();
}

template <Variant kVariant>
__device__ void ChainVerifier<kVariant>::accept_or_draw(bool accepted) {
  record_accept_prob(t_.i, accepted);
  accepted ? accept(drafted_logprob()) : draw_p();
}

}  // namespace specdec::cuda
