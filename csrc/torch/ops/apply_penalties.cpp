#include "arguments/penalties.h"
#include "torch/register.h"

namespace specdec {
namespace {

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  define<PenaltyArguments>(m, "apply_penalties_", "()");
}
constexpr auto& apply_penalties_ = Op<PenaltyArguments>::run;
SPECDEC_IMPLEMENT(apply_penalties_)
SPECDEC_VALIDATE(apply_penalties_, Op<PenaltyArguments>::validate)

}  // namespace
}  // namespace specdec
