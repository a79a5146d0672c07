#include "arguments/chain.h"

namespace specdec {

void ChainArguments::check() const {
  const Names names = {"draft_token_ids", "gamma", "R"};
  checked_kind();
  checked_rule();
  check_drafted(names);
  check_target(names);
  check_draft(names);
  check_draws("[B, gamma+1]", size() + 1, checked_rule() == Rule::kMatch);
  check_rule();
  check_limits();
}

void ChainArguments::check_draft(const Names& names) const {
  if (draft_rows) return check_chosen_draft(names);
  const int64_t b = batch();
  const DraftSizes each = {{"B", b}, {"gamma", size()}};
  if (!target_indptr || !flat_draft()) return draft_arguments.check(target, b, each, each);
  const int64_t n = target.size(0) - b;
  SPECDEC_CHECK(n >= 0, "target must be [R, V] with R >= B = ", b, " when draft is [R-B, ",
                draft_arguments.ids ? "K" : "D", "], got ", shape_of(target));
  draft_arguments.check(target, b, {{"R-B", n}}, each);
}

void ChainArguments::check_rule() const {
  const Rule is = checked_rule();
  check_rule_parameters(of_rules, is, kParameters);
  SPECDEC_CHECK(synthetic_rates.has_value() == (is == Rule::kSynthetic),
                "synthetic_rates must be given with rule synthetic and with no other");
  SPECDEC_CHECK(!token_bitmask || is != Rule::kSynthetic,
                "token_bitmask must be None when rule is synthetic, which reads no row");
  if (synthetic_rates) {
    check_vector("synthetic_rates", *synthetic_rates, size(), ScalarType::Float, target, "target");
  }
}

std::array<Output, 5> ChainArguments::outputs() const {
  const int64_t b = batch(), emitted = size() + 1;
  return {{{"[B, gamma+1]", drafted.scalar_type(), b, emitted},
           {"[B]", ScalarType::Int, b},
           {"[B]", ScalarType::Int, b},
           {"[B, gamma+1]", ScalarType::Float, b, emitted, with_logprobs},
           {"[B, gamma]", ScalarType::Float, b, size(), with_accept_probs}}};
}

ChainParams ChainArguments::params(const ChainOutputs& out) {
  const auto& [tokens, num_accepted, status, logprobs, accept_probs] = out;
  ChainParams p = of_rules;
  fill(p);
  fill_outputs(p, tokens, num_accepted, status, logprobs, accept_probs);
  p.rule = checked_rule();
  p.gamma = size();
  p.synthetic_rates = pointer<float>(synthetic_rates);
  return p;
}

}  // namespace specdec
