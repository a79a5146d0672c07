// Facts that _library.py asks for: how this library was built, and what the processor runs.
#include "cpu/capability.h"
#include "torch/register.h"

namespace specdec {
namespace {

bool built_with_cuda() {
#ifdef SPECDEC_WITH_CUDA
  return true;
#else
  return false;
#endif
}

// The number of the instruction set in CPU_CAPABILITIES of _library.py.
int64_t cpu_capability() {
  return static_cast<int64_t>(cpu::Capability::kAmxBf16) - static_cast<int64_t>(cpu::capability());
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("built_with_cuda() -> bool");
  m.def("cpu_capability() -> int");
}
SPECDEC_IMPLEMENT_ANYWHERE(built_with_cuda)
SPECDEC_IMPLEMENT_ANYWHERE(cpu_capability)

}  // namespace
}  // namespace specdec
