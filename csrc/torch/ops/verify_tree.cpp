#include "arguments/tree.h"
#include "torch/register.h"

namespace specdec {
namespace {

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  define<TreeArguments>(
      m, "verify_tree",
      "(Tensor path, Tensor tokens, Tensor num_accepted, Tensor status, Tensor logprobs, "
      "Tensor accept_probs)");
}
constexpr auto& verify_tree = Op<TreeArguments>::run;
SPECDEC_IMPLEMENT(verify_tree)
SPECDEC_VALIDATE(verify_tree, Op<TreeArguments>::validate)

}  // namespace
}  // namespace specdec
