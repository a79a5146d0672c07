#include "torch/arguments/chain.h"

namespace specdec {

bool ChainArguments::ragged_draft() const {
  return draft_arguments.rows && target_indptr && draft_arguments.rows->dim() == 2;
}

void ChainArguments::check() const {
  const Names names = {"draft_token_ids", "gamma", "R"};
  checked_kind();
  checked_rule();
  check_drafted(names);
  check_target(names);
  check_draft();
  check_draws("[B, gamma+1]", size() + 1, checked_rule() == Rule::kMatch);
  check_rule();
  check_limits();
}

void ChainArguments::check_draft() const {
  const int64_t b = batch();
  const DraftSizes each = {{"B", b}, {"gamma", size()}};
  if (!ragged_draft()) return draft_arguments.check(target, b, each, each);
  const int64_t n = target.size(0) - b;
  SPECDEC_CHECK(n >= 0, "target must be [R, V] with R >= B = ", b, " when draft is [R-B, ",
                draft_arguments.ids ? "K" : "D", "], got ", shape_of(target));
  draft_arguments.check(target, b, {{"R-B", n}}, each);
}

void ChainArguments::check_rule() const {
  const float l = static_cast<float>(lenience);
  SPECDEC_CHECK(0 < l && l <= 1, "lenience must be in (0, 1], got ", l);
  check_typical();
  SPECDEC_CHECK(synthetic_rates.has_value() == (checked_rule() == Rule::kSynthetic),
                "synthetic_rates must be given with rule synthetic and with no other");
  if (synthetic_rates) {
    check_vector("synthetic_rates", *synthetic_rates, size(), ScalarType::Float, target, "target");
  }
}

ChainOutputs ChainArguments::new_outputs() const {
  return {new_output(size() + 1, drafted.scalar_type()), new_counts(), new_counts(),
          new_floats(with_logprobs, size() + 1), new_floats(with_accept_probs, size())};
}

ChainParams ChainArguments::params(const ChainOutputs& out) {
  const auto& [tokens, num_accepted, status, logprobs, accept_probs] = out;
  ChainParams p{};
  fill(p, ragged_draft());
  fill_outputs(p, tokens, num_accepted, status, logprobs, accept_probs);
  p.rule = checked_rule();
  p.gamma = size();
  p.lenience = p.rule == Rule::kLenient ? static_cast<float>(lenience) : 1.0f;
  p.synthetic_rates = pointer<float>(synthetic_rates);
  return p;
}

}  // namespace specdec
