#pragma once
// The arguments that verify_chain and verify_tree share, and their validation.
#include <optional>

#include "arguments/draft.h"
#include "specdec/verification.h"

namespace specdec {

// A parameter of another rule must keep the default of the public functions, because a value that
// no rule reads is a mistake of the caller.
template <class T>
void check_unread(const char* name, T value, T its_default, const char* rule, bool is_read) {
  SPECDEC_CHECK(is_read || value == its_default, name, " must be ", its_default, " unless rule is ",
                rule, ", got ", value);
}

struct VerifyArguments {
  Tensor target, drafted;  // drafted: token ids, [B, gamma], or [B, N] of a tree
  DraftArguments draft_arguments;
  int64_t kind, rule;  // the numbers of Kind, and of Rule or TreeRule
  SamplingArguments sampling;
  Tensor seeds, positions;
  std::optional<Tensor> target_indptr, uniforms;
  double typical_epsilon, typical_delta;
  std::optional<Tensor> eos_token_ids, max_new_tokens;
  bool with_logprobs, with_accept_probs;

 protected:
  // The names in messages of the drafted tokens, of their number, and of the rows of a ragged
  // target.
  struct Names {
    const char *drafted, *size, *rows;
  };

  // Arguments that follow each other in both schemas.
  auto arguments_of_both() {
    return std::tuple_cat(
        std::make_tuple(argument("kind", kind), argument("rule", rule)), sampling.arguments(),
        std::make_tuple(argument("seeds", seeds), argument("positions", positions),
                        argument("target_indptr", target_indptr), argument("uniforms", uniforms)));
  }
  auto typical_arguments() {
    return std::make_tuple(argument("typical_epsilon", typical_epsilon),
                           argument("typical_delta", typical_delta));
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
  // Each throws on the first fault.
  void check_drafted(const Names& names) const;
  void check_target(const Names& names) const;
  void check_draws(const char* uniforms_shape, int64_t columns, bool rule_is_match) const;
  void check_typical(bool rule_is_typical) const;
  void check_limits() const;
  Tensor new_output(int64_t columns, ScalarType dtype) const;
  Tensor new_counts() const;
  Tensor new_floats(bool wanted, int64_t columns) const;
  // Fills in pointers into these arguments, which become contiguous where kernels need it.
  void fill(VerifyParams& p, bool flat_draft);
  void fill_outputs(VerifyParams& p, const Tensor& tokens, const Tensor& num_accepted,
                    const Tensor& status, const Tensor& logprobs, const Tensor& accept_probs) const;
};

}  // namespace specdec
