#include "arguments/chain.h"
#include "torch/register.h"

namespace specdec {
namespace {

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  define<ChainArguments>(m, "verify_chain",
                         "(Tensor tokens, Tensor num_accepted, Tensor status, Tensor logprobs, "
                         "Tensor accept_probs)");
}
constexpr auto& verify_chain = Op<ChainArguments>::run;
SPECDEC_IMPLEMENT(verify_chain)
SPECDEC_VALIDATE(verify_chain, Op<ChainArguments>::validate)

}  // namespace
}  // namespace specdec
