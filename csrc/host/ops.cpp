// The ops of specdec_host. They take NumPy arrays; the Python package makes them from other ones.
#include "host/ops.h"

#include "arguments/chain.h"
#include "arguments/kept_tokens.h"
#include "arguments/sample.h"
#include "arguments/tree.h"
#include "cpu/row/tile.h"
#include "cpu/thread_count.h"
#include "cpu/threads.h"
#include "host/arrays.h"
#include "host/digests.h"

namespace specdec::host {
namespace {

std::vector<uint64_t> digests_of(const std::vector<pybind11::array>& arrays, int threads) {
  std::vector<Buffer> buffers;
  for (const pybind11::array& array : arrays) {
    buffers.push_back({static_cast<const char*>(array.data()), array.nbytes()});
  }
  const pybind11::gil_scoped_release unlocked;
  return digests(buffers, cpu::pooled(threads));
}

}  // namespace

void define_ops(pybind11::module_& m) {
  m.def("kept_tokens", &Op<KeptTokensArguments>::run);
  m.def("sample", &Op<SampleArguments>::run);
  m.def("verify_chain", &Op<ChainArguments>::run);
  m.def("verify_tree", &Op<TreeArguments>::run);
  m.def("bfloat16_from_dlpack", &bfloat16_from_dlpack);
  m.def("digests", &digests_of);
  m.def("cpu_capability", [] { return std::string(cpu::tile_kernels().isa); });
  m.def("get_num_threads", &cpu::num_threads);
  m.def("set_num_threads", &cpu::set_num_threads);
}

}  // namespace specdec::host
