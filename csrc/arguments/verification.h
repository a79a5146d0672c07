#pragma once
// The arguments that verify_chain and verify_tree share, and their validation.
#include <cmath>
#include <optional>
#include <tuple>

#include "arguments/draft.h"
#include "arguments/output.h"
#include "specdec/verification.h"

namespace specdec {

// A parameter of a single rule: an argument of the op, and a field of what its kernels take. Under
// other rules it must keep the default of the public functions, because a value that no rule reads
// is a mistake of the caller. specdec_kernels/arguments/rules.py has the defaults too.
template <class Params, class T, class Rule>
struct RuleParameter {
  T Params::* field;
  const char* name;
  T its_default;
  const char* range;  // in words, what `holds` tells
  bool (*holds)(T);
  Rule rule;
  const char* rule_name;

  void check(const Params& params, Rule is) const {
    const T value = params.*field;
    SPECDEC_CHECK(holds(value), name, " must be ", range, ", got ", value);
    SPECDEC_CHECK(is == rule || value == its_default, name, " must be ", its_default,
                  " unless rule is ", rule_name, ", got ", value);
  }
};

// Those of rule typical, which chains and trees have.
template <class Params, class Rule>
constexpr auto typical_parameters() {
  using Parameter = RuleParameter<Params, float, Rule>;
  return std::make_tuple(
      Parameter{&Params::typical_epsilon, "typical_epsilon", 0.09f, "in [0, 1]",
                [](float x) { return 0 <= x && x <= 1; }, Rule::kTypical, "typical"},
      Parameter{&Params::typical_delta, "typical_delta", 0.3f, "finite and at least 0",
                [](float x) { return std::isfinite(x) && x >= 0; }, Rule::kTypical, "typical"});
}

template <class Params, class... Parameters>
auto rule_arguments(Params& params, const std::tuple<Parameters...>& parameters) {
  return std::apply(
      [&](const auto&... each) {
        return std::make_tuple(argument(each.name, params.*each.field)...);
      },
      parameters);
}

template <class Params, class Rule, class... Parameters>
void check_rule_parameters(const Params& params, Rule is,
                           const std::tuple<Parameters...>& parameters) {
  std::apply([&](const auto&... each) { (each.check(params, is), ...); }, parameters);
}

// Those of every rule as each other rule must keep them.
template <class Params, class... Parameters>
Params default_parameters(const std::tuple<Parameters...>& parameters) {
  Params params{};
  std::apply([&](const auto&... each) { ((params.*each.field = each.its_default), ...); },
             parameters);
  return params;
}

struct VerifyArguments {
  Tensor target, drafted;  // drafted: token ids, [B, gamma], or [B, N] of a tree
  DraftArguments draft_arguments;
  int64_t kind, rule;  // the numbers of Kind, and of Rule or TreeRule
  SamplingArguments sampling;
  std::optional<Tensor> token_bitmask;
  Tensor seeds, positions;
  std::optional<Tensor> draft_rows, target_indptr, uniforms;
  std::optional<Tensor> eos_token_ids, max_new_tokens;
  bool with_logprobs, with_accept_probs;

  // The entries of the longest row of the target and of the draft.
  int64_t widest_row() const;

 protected:
  // The names in messages of the drafted tokens, of their number, and of the rows of a ragged
  // target.
  struct Names {
    const char *drafted, *size, *rows;
  };

  // Arguments that follow each other in both schemas.
  auto arguments_of_both() {
    return std::tuple_cat(
        std::make_tuple(argument("draft_rows", draft_rows), argument("kind", kind),
                        argument("rule", rule)),
        sampling.arguments(),
        std::make_tuple(argument("token_bitmask", token_bitmask), argument("seeds", seeds),
                        argument("positions", positions), argument("target_indptr", target_indptr),
                        argument("uniforms", uniforms)));
  }
  auto limits() {
    return std::make_tuple(argument("eos_token_ids", eos_token_ids),
                           argument("max_new_tokens", max_new_tokens));
  }
  auto wanted_outputs() {
    return std::make_tuple(argument("with_logprobs", with_logprobs),
                           argument("with_accept_probs", with_accept_probs));
  }

  Kind checked_kind() const { return enum_of("kind", kind, Kind::kProbs); }
  int64_t batch() const { return drafted.size(0); }
  int64_t size() const { return drafted.size(1); }
  bool flat_draft() const { return draft_arguments.rows && draft_arguments.rows->dim() == 2; }
  // Each throws on the first fault.
  void check_drafted(const Names& names) const;
  void check_target(const Names& names) const;
  // Of a draft from which `draft_rows` chooses.
  void check_chosen_draft(const Names& names) const;
  void check_draws(const char* uniforms_shape, int64_t columns, bool rule_is_match) const;
  void check_limits() const;
  // Fills in pointers into these arguments, which become contiguous where kernels need it.
  void fill(VerifyParams& p);
  void fill_outputs(VerifyParams& p, const Tensor& tokens, const Tensor& num_accepted,
                    const Tensor& status, const Tensor& logprobs, const Tensor& accept_probs) const;
};

}  // namespace specdec
