#include "arguments/sample.h"

#include "torch/register.h"

namespace specdec {
namespace {

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  const std::string arguments =
      "(Tensor logits, Tensor? temperatures, float temperature, Tensor? top_ks, int top_k, "
      "Tensor? top_ps, float top_p, Tensor? min_ps, float min_p, Tensor seeds, Tensor positions, "
      "int noise, int method)";
  m.def(("sample" + arguments +
         " -> (Tensor tokens, Tensor logprobs, Tensor logsumexp, Tensor threshold, Tensor status)")
            .c_str());
  m.def(("validate_sample" + arguments + " -> ()").c_str());
}
constexpr auto& sample = Op<sample_arguments>::run;
SPECDEC_IMPLEMENT(sample)
SPECDEC_VALIDATE(sample, Op<sample_arguments>::validate)

}  // namespace
}  // namespace specdec
