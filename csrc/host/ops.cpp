// The ops of specdec_host. They take NumPy arrays; the Python package makes them from other ones.
#include "host/ops.h"

#include "arguments/chain.h"
#include "arguments/sample.h"
#include "arguments/tree.h"
#include "cpu/row/tile.h"
#include "host/arrays.h"
#include "host/threads.h"

namespace specdec::host {

void define_ops(pybind11::module_& m) {
  m.def("sample", &Op<SampleArguments>::run);
  m.def("verify_chain", &Op<ChainArguments>::run);
  m.def("verify_tree", &Op<TreeArguments>::run);
  m.def("bfloat16_from_dlpack", &bfloat16_from_dlpack);
  m.def("cpu_capability", [] { return std::string(cpu::tile_kernels().isa); });
  m.def("get_num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads);
}

}  // namespace specdec::host
