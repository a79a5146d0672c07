#pragma once
// The arguments of kept_tokens by name and their validation.
#include <tuple>

#include "arguments/checks.h"
#include "specdec/kept_tokens.h"

namespace specdec {

using KeptTokensOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct KeptTokensArguments {
  Tensor target;
  std::optional<Tensor> rows, target_indptr;
  int64_t kind, max_kept;  // kind: the number of Kind
  SamplingArguments sampling;
  std::optional<Tensor> token_bitmask;

  auto arguments() {
    return std::tuple_cat(std::make_tuple(argument("target", target), argument("rows", rows),
                                          argument("target_indptr", target_indptr),
                                          argument("kind", kind), argument("max_kept", max_kept)),
                          sampling.arguments(),
                          std::make_tuple(argument("token_bitmask", token_bitmask)));
  }
  // Throws a message that names the argument, the rule and the value.
  void check() const;
  KeptTokensOutputs new_outputs() const;
  // Pointers into these arguments, which become contiguous where kernels need it, and into `out`.
  KeptTokensParams params(const KeptTokensOutputs& out);
  // The op.
  KeptTokensOutputs run();

 private:
  Kind checked_kind() const { return enum_of("kind", kind, Kind::kProbs); }
  int64_t batch() const { return target_indptr ? target_indptr->size(0) - 1 : target.size(0); }
  // A target of rows that belong to no sequences: each output has one dimension less.
  bool plain() const { return target.dim() == 2 && !target_indptr; }
  int64_t rows_each() const { return rows ? rows->size(1) : plain() ? 1 : target.size(1); }
};

}  // namespace specdec
