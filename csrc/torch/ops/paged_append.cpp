#include "arguments/caches.h"
#include "torch/register.h"

namespace specdec {
namespace {

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "paged_append_(Tensor(a!)[] caches, Tensor[] entries, Tensor block_tables, "
      "Tensor positions, Tensor? counts) -> ()");
  m.def(
      "validate_paged_append_(Tensor[] caches, Tensor[] entries, Tensor block_tables, "
      "Tensor positions, Tensor? counts) -> ()");
}
SPECDEC_IMPLEMENT(paged_append_)
SPECDEC_VALIDATE(paged_append_, check_paged_append)

}  // namespace
}  // namespace specdec
