#include "specdec/sample.h"

#include "torch/arguments/sample.h"
#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sample(
    Tensor logits, std::optional<Tensor> temperatures, double temperature,
    std::optional<Tensor> top_ks, int64_t top_k, std::optional<Tensor> top_ps, double top_p,
    std::optional<Tensor> min_ps, double min_p, Tensor seeds, Tensor positions, int64_t noise,
    int64_t method) {
  SampleArguments a{
      logits, {temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p},
      seeds,  positions,
      noise,  method};
  a.check();
  const SampleOutputs out = a.new_outputs();
  launch(logits, a.params(out), SPECDEC_LAUNCHERS(SampleParams, sample));
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "sample(Tensor logits, Tensor? temperatures, float temperature, Tensor? top_ks, int top_k, "
      "Tensor? top_ps, float top_p, Tensor? min_ps, float min_p, Tensor seeds, Tensor positions, "
      "int noise, int method) -> (Tensor tokens, Tensor logprobs, Tensor logsumexp, "
      "Tensor threshold, Tensor status)");
}
SPECDEC_IMPLEMENT(sample)

}  // namespace
}  // namespace specdec
