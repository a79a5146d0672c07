#pragma once
// What the arguments of all ops that verify have in common; specdec_kernels/_verify_arguments.py in
// C++.
#include <optional>
#include <string>

#include "specdec/verification.h"
#include "torch/arguments/draft.h"

namespace specdec {

struct VerifyArguments {
  Tensor target, drafted;
  DraftArguments draft_source;
  std::string kind, rule;
  SamplingArguments sampling;
  Tensor seeds, positions;
  std::optional<Tensor> target_indptr, uniforms;
  double typical_epsilon, typical_delta;
  std::optional<Tensor> eos_token_ids, max_new_tokens;
  bool with_logprobs, with_accept_probs;

 protected:
  // What a message calls the drafted tokens and their number, and the rows of a ragged target.
  struct Names {
    const char *drafted, *size, *rows;
  };

  int64_t batch() const { return drafted.size(0); }
  int64_t size() const { return drafted.size(1); }
  // Throw what the user did wrong; in the order of Python's, so that of two faults both name one.
  void check_drafted(const Names& names) const;
  void check_target(const Names& names) const;
  void check_draws(const char* uniforms_shape, int64_t columns) const;
  void check_typical() const;
  void check_limits() const;
  Tensor new_output(int64_t columns, ScalarType dtype) const;
  Tensor new_counts() const;
  Tensor new_floats(bool wanted, int64_t columns) const;
  // Pointers into these arguments, made dense where the kernels want it.
  void fill(VerifyParams& p, bool flat_draft);
  void fill_outputs(VerifyParams& p, const Tensor& tokens, const Tensor& num_accepted,
                    const Tensor& status, const Tensor& logprobs, const Tensor& accept_probs) const;
};

}  // namespace specdec
