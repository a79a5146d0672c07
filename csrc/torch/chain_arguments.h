#pragma once
// The arguments of verify_chain by name; specdec_kernels/_chain_arguments.py in C++.
#include <optional>
#include <string>
#include <tuple>

#include "specdec/chain.h"
#include "torch/draft_arguments.h"

namespace specdec {

using ChainOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct ChainArguments {
  Tensor target, draft_tokens;
  DraftArguments law;
  std::string kind, rule;
  SamplingArgs sampling;
  Tensor seeds, positions;
  std::optional<Tensor> cu_rows, uniforms;
  double lenience, typical_epsilon, typical_delta;
  std::optional<Tensor> synthetic_rates, eos_ids, max_emit;
  bool with_logprobs, with_acceptance;

  // Throws what the user did wrong.
  void check() const;
  ChainOutputs new_outputs() const;
  // Pointers into these arguments, made dense where the kernels want it, and into `out`.
  ChainParams params(const ChainOutputs& out);

 private:
  bool ragged_draft() const;
  void check_target() const;
  void check_draft() const;
  void check_uniforms() const;
  void check_rule() const;
  void check_limits() const;
};

}  // namespace specdec
