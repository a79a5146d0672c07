#include "arguments/sample.h"

#include "torch/register.h"

namespace specdec {
namespace {

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  define<SampleArguments>(
      m, "sample",
      "(Tensor tokens, Tensor logprobs, Tensor logsumexp, Tensor threshold, Tensor status)");
}
constexpr auto& sample = Op<SampleArguments>::run;
SPECDEC_IMPLEMENT(sample)
SPECDEC_VALIDATE(sample, Op<SampleArguments>::validate)

}  // namespace
}  // namespace specdec
