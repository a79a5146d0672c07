// Facts that _library.py asks for: how this library was built, and what the processor runs.
#include <string_view>

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

// The number of the instruction set in CPU_CAPABILITIES of _library.py.
int64_t cpu_capability() {
  const std::string_view isa = cpu::tile_kernels().isa;
  return isa == "avx512" ? 0 : isa == "avx2" ? 1 : 2;
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("built_with_cuda() -> bool");
  m.def("cpu_capability() -> int");
}
SPECDEC_IMPLEMENT_ANYWHERE(built_with_cuda)
SPECDEC_IMPLEMENT_ANYWHERE(cpu_capability)

}  // namespace
}  // namespace specdec
