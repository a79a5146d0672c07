#include "arguments/caches.h"
#include "torch/register.h"

namespace specdec {
namespace {

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("kv_compact_(Tensor(a!)[] caches, Tensor base, Tensor path) -> ()");
  m.def("validate_kv_compact_(Tensor[] caches, Tensor base, Tensor path) -> ()");
  m.def("paged_compact_(Tensor(a!)[] caches, Tensor block_tables, Tensor base, Tensor path) -> ()");
  m.def(
      "validate_paged_compact_(Tensor[] caches, Tensor block_tables, Tensor base, "
      "Tensor path) -> ()");
}
SPECDEC_IMPLEMENT(kv_compact_)
SPECDEC_VALIDATE(kv_compact_, check_compact)
SPECDEC_IMPLEMENT(paged_compact_)
SPECDEC_VALIDATE(paged_compact_, check_paged_compact)

}  // namespace
}  // namespace specdec
