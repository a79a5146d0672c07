#pragma once
// The arguments of apply_penalties_ by name and their validation.
#include <optional>
#include <tuple>

#include "arguments/checks.h"

namespace specdec {

// A penalty as a vector [B], or as a scalar for all sequences.
struct Penalty {
  std::optional<Tensor> each;
  double all = 0;

  void check(const char* name, int64_t batch, const Tensor& target, bool positive) const;
};

struct PenaltyArguments {
  Tensor target, drafted;
  std::optional<Tensor> parents, target_indptr, token_counts, prompt_mask;
  Penalty repetition{{}, 1}, presence, frequency;
  std::optional<Tensor> bias_ids, biases, min_new_tokens, eos_token_ids;

  auto arguments() {
    return std::make_tuple(
        argument("target", target, "Tensor(a!)"), argument("draft_token_ids", drafted),
        argument("parents", parents), argument("target_indptr", target_indptr),
        argument("token_counts", token_counts), argument("prompt_mask", prompt_mask),
        argument("repetition_penalties", repetition.each),
        argument("repetition_penalty", repetition.all),
        argument("presence_penalties", presence.each), argument("presence_penalty", presence.all),
        argument("frequency_penalties", frequency.each),
        argument("frequency_penalty", frequency.all), argument("bias_ids", bias_ids),
        argument("biases", biases), argument("min_new_tokens", min_new_tokens),
        argument("eos_token_ids", eos_token_ids));
  }

  int64_t batch() const { return drafted.size(0); }
  int64_t vocab() const { return target.size(target.dim() - 1); }

  // Throws a message that names the argument, the rule and the value.
  void check() const;
  // The op.
  void run();

 private:
  void check_words(const char* name, const char* shape, const std::optional<Tensor>& t,
                   int64_t columns) const;
  void check_biases() const;
};

}  // namespace specdec
