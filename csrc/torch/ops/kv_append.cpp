#include "arguments/caches.h"
#include "torch/register.h"

namespace specdec {
namespace {

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("kv_append_(Tensor(a!)[] caches, Tensor[] entries, Tensor positions) -> ()");
  m.def("validate_kv_append_(Tensor[] caches, Tensor[] entries, Tensor positions) -> ()");
}
SPECDEC_IMPLEMENT(kv_append_)
SPECDEC_VALIDATE(kv_append_, check_append)

}  // namespace
}  // namespace specdec
