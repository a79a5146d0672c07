#include "arguments/sample.h"

#include "torch/register.h"

namespace specdec {
namespace {

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
