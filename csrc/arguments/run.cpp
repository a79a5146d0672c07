// The ops whose outputs are tensors that they allocate.
#include "arguments/chain.h"
#include "arguments/launch.h"
#include "arguments/sample.h"
#include "arguments/tree.h"

namespace specdec {

Tensor VerifyArguments::new_output(int64_t columns, ScalarType dtype) const {
  return new_empty(drafted, {batch(), columns}, dtype);
}

Tensor VerifyArguments::new_counts() const {
  return new_empty(drafted, {batch()}, ScalarType::Int);
}

Tensor VerifyArguments::new_floats(bool wanted, int64_t columns) const {
  return wanted ? new_output(columns, ScalarType::Float)
                : new_empty(drafted, {0, 0}, ScalarType::Float);
}

SampleOutputs SampleArguments::new_outputs() const {
  const auto output = [&](ScalarType dtype) { return new_empty(logits, {logits.size(0)}, dtype); };
  return {output(ScalarType::Long), output(ScalarType::Float), output(ScalarType::Double),
          output(ScalarType::Float), output(ScalarType::Int)};
}

SampleOutputs SampleArguments::run() {
  check();
  const SampleOutputs out = new_outputs();
  launch(logits, params(out), SPECDEC_LAUNCHERS(SampleParams, sample));
  return out;
}

ChainOutputs ChainArguments::new_outputs() const {
  return {new_output(size() + 1, drafted.scalar_type()), new_counts(), new_counts(),
          new_floats(with_logprobs, size() + 1), new_floats(with_accept_probs, size())};
}

ChainOutputs ChainArguments::run() {
  check();
  const ChainOutputs out = new_outputs();
  launch(target, params(out), SPECDEC_LAUNCHERS(ChainParams, verify_chain));
  return out;
}

TreeOutputs TreeArguments::new_outputs() const {
  return {new_output(max_depth, parents.scalar_type()),
          new_output(max_depth + 1, drafted.scalar_type()),
          new_counts(),
          new_counts(),
          new_floats(with_logprobs, max_depth + 1),
          new_floats(with_accept_probs, size())};
}

TreeOutputs TreeArguments::run() {
  check();
  const TreeOutputs out = new_outputs();
  launch(target, params(out), SPECDEC_LAUNCHERS(TreeParams, verify_tree));
  return out;
}

}  // namespace specdec
