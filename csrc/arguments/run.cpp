// The ops whose outputs are tensors that they allocate, or that a caller brings.
#include <array>
#include <cstddef>
#include <tuple>

#include "arguments/chain.h"
#include "arguments/kept_tokens.h"
#include "arguments/launch.h"
#include "arguments/sample.h"
#include "arguments/tree.h"

namespace specdec {
namespace {

Tensor allocated(const Output& o, const Tensor& like) {
  if (!o.wanted) return new_empty(like, {0, 0}, o.dtype);
  if (o.columns == Output::kVector) return new_empty(like, {o.rows}, o.dtype);
  return new_empty(like, {o.rows, o.columns}, o.dtype);
}

// A tuple of tensors.
template <class Outputs, size_t n>
Outputs allocated(const std::array<Output, n>& outputs, const Tensor& like) {
  return std::apply([&](const auto&... each) { return Outputs{allocated(each, like)...}; },
                    outputs);
}

}  // namespace

SampleOutputs SampleArguments::run() {
  check();
  const auto out = allocated<SampleOutputs>(outputs(), logits);
  run_into(out);
  return out;
}

void SampleArguments::run_into(const SampleOutputs& out, const std::optional<Tensor>& workspace) {
  launch(logits, params(out), SPECDEC_LAUNCHERS(SampleParams, sample), workspace);
}

KeptTokensOutputs KeptTokensArguments::new_outputs() const {
  const auto output = [&](ScalarType dtype, bool each) {
    const int64_t b = batch(), e = rows_each();
    if (plain())
      return each ? new_empty(target, {b, max_kept}, dtype) : new_empty(target, {b}, dtype);
    return each ? new_empty(target, {b, e, max_kept}, dtype) : new_empty(target, {b, e}, dtype);
  };
  return {output(ScalarType::Long, true), output(ScalarType::Float, true),
          output(ScalarType::Int, false), output(ScalarType::Int, false)};
}

KeptTokensOutputs KeptTokensArguments::run() {
  check();
  const KeptTokensOutputs out = new_outputs();
  launch(target, params(out), SPECDEC_LAUNCHERS(KeptTokensParams, kept_tokens));
  return out;
}

ChainOutputs ChainArguments::run() {
  check();
  const auto out = allocated<ChainOutputs>(outputs(), drafted);
  run_into(out);
  return out;
}

void ChainArguments::run_into(const ChainOutputs& out, const std::optional<Tensor>& workspace) {
  launch(target, params(out), SPECDEC_LAUNCHERS(ChainParams, verify_chain), workspace);
}

TreeOutputs TreeArguments::run() {
  check();
  const auto out = allocated<TreeOutputs>(outputs(), drafted);
  run_into(out);
  return out;
}

void TreeArguments::run_into(const TreeOutputs& out, const std::optional<Tensor>& workspace) {
  launch(target, params(out), SPECDEC_LAUNCHERS(TreeParams, verify_tree), workspace);
}

}  // namespace specdec
