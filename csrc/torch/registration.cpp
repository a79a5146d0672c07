// Every schema of the library. Fake kernels stand under the public functions in Python; Triton
// registers its own implementations for CUDA devices there too.
#include <torch/csrc/stable/library.h>

#include "cpu/tile.h"
#include "torch/kv.h"
#include "torch/ops.h"
#include "torch/provider.h"
#include "torch/schemas.h"

namespace specdec {
namespace {

bool built_with_cuda() {
#ifdef SPECDEC_WITH_CUDA
  return true;
#else
  return false;
#endif
}

std::string cpu_capability() { return tile_kernels().isa; }

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY(specdec_kernels, m) {
  m.def(specdec::kSampleSchema);
  m.def(specdec::kVerifyChainSchema);
  m.def(specdec::kVerifyTreeSchema);
  m.def("kv_append_(Tensor(a!)[] caches, Tensor[] entries, Tensor positions) -> ()");
  m.def(
      "kv_truncate_(Tensor(a!)[] caches, Tensor(b!) lengths, Tensor new_lengths, "
      "bool zero_fill) -> ()");
  m.def("built_with_cuda() -> bool");
  m.def("cpu_capability() -> str");
  m.def("set_cuda_schedule(str schedule, int team) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  m.impl("sample", TORCH_BOX(&specdec::sample));
  m.impl("verify_chain", TORCH_BOX(&specdec::verify_chain));
  m.impl("verify_tree", TORCH_BOX(&specdec::verify_tree));
  m.impl("kv_append_", TORCH_BOX(&specdec::kv_append_));
  m.impl("kv_truncate_", TORCH_BOX(&specdec::kv_truncate_));
}

#ifdef SPECDEC_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CUDA, m) {
  m.impl("sample", TORCH_BOX(&specdec::sample));
  m.impl("verify_chain", TORCH_BOX(&specdec::verify_chain));
  m.impl("verify_tree", TORCH_BOX(&specdec::verify_tree));
  m.impl("kv_append_", TORCH_BOX(&specdec::kv_append_));
  m.impl("kv_truncate_", TORCH_BOX(&specdec::kv_truncate_));
}
#endif

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CompositeExplicitAutograd, m) {
  m.impl("built_with_cuda", TORCH_BOX(&specdec::built_with_cuda));
  m.impl("cpu_capability", TORCH_BOX(&specdec::cpu_capability));
  m.impl("set_cuda_schedule", TORCH_BOX(&specdec::set_cuda_schedule));
}
