#include "arguments/kept_tokens.h"

#include "torch/register.h"

namespace specdec {
namespace {

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  define<KeptTokensArguments>(m, "kept_tokens",
                              "(Tensor ids, Tensor logprobs, Tensor counts, Tensor status)");
}
constexpr auto& kept_tokens = Op<KeptTokensArguments>::run;
SPECDEC_IMPLEMENT(kept_tokens)
SPECDEC_VALIDATE(kept_tokens, Op<KeptTokensArguments>::validate)

}  // namespace
}  // namespace specdec
