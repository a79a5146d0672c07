// Facts that _library.py asks for: how this library was built, and what the processor runs.
#include <string>

#include "cpu/row/tile.h"
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

std::string cpu_capability() { return cpu::tile_kernels().isa; }

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("built_with_cuda() -> bool");
  m.def("cpu_capability() -> str");
}
SPECDEC_IMPLEMENT_ANYWHERE(built_with_cuda)
SPECDEC_IMPLEMENT_ANYWHERE(cpu_capability)

}  // namespace
}  // namespace specdec
