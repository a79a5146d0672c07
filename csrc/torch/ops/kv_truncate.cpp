#include "arguments/caches.h"
#include "torch/register.h"

namespace specdec {
namespace {

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "kv_truncate_(Tensor(a!)[] caches, Tensor(b!) lengths, Tensor new_lengths, "
      "bool zero_fill) -> ()");
  m.def(
      "validate_kv_truncate_(Tensor[] caches, Tensor lengths, Tensor new_lengths, "
      "bool zero_fill) -> ()");
}
SPECDEC_IMPLEMENT(kv_truncate_)
SPECDEC_VALIDATE(kv_truncate_, check_truncate)

}  // namespace
}  // namespace specdec
