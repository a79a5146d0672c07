// The ops as csrc/torch binds them, served by the CUDA source on CPU tensors, under a name of their
// own; for tests/test_simt_ops.py.
#include "../../csrc/torch/chain.cpp"
#include "../../csrc/torch/chain_arguments.cpp"
#include "../../csrc/torch/checks.cpp"
#include "../../csrc/torch/provider.cpp"
#include "../../csrc/torch/sample.cpp"
#include "cuda_runtime.h"
#include "torch/schemas.h"

namespace specdec {

// No CUDA device: every tensor is on the CPU, and this stands where the CPU kernels would.
template <class Params>
void run_in_shim(const Params& p, int (*plan)(const Params&, const CudaRequest&, CudaPlan*),
                 int (*launch)(const Params&, const CudaPlan&, void*, void*)) {
  CudaPlan how = {};
  int status = plan(p, cuda_request(), &how);
  std::vector<unsigned char> workspace(how.workspace_bytes + 16, 0xff);
  unsigned char* const end = workspace.data() + how.workspace_bytes;
  if (status == 0) status = launch(p, how, workspace.data(), nullptr);
  for (int i = 0; i < 16; ++i) SPECDEC_CHECK(end[i] == 0xff, "written beyond the workspace");
  SPECDEC_CHECK(status == 0,
                "the launch failed: ", cudaGetErrorString(static_cast<cudaError_t>(status)));
}

void sample_cpu(const SampleParams& p, const Parallel&) {
  run_in_shim(p, plan_sample_cuda, sample_cuda);
}

void verify_chain_cpu(const ChainParams& p, const Parallel&) {
  run_in_shim(p, plan_verify_chain_cuda, verify_chain_cuda);
}

Parallel torch_parallel() { return serial(); }

}  // namespace specdec

extern "C" __attribute__((visibility("default"))) void simt_order(bool reverse, uint64_t seed) {
  simt::reverse = reverse;
  simt::shuffle_seed = seed;
}

extern "C" __attribute__((visibility("default"))) void simt_device(int multiprocessors,
                                                                   int capability) {
  simt::multiprocessors = multiprocessors;
  simt::capability_major = capability;
}

STABLE_TORCH_LIBRARY(specdec_kernels_simt, m) {
  m.def(specdec::kSampleSchema);
  m.def(specdec::kVerifyChainSchema);
  m.def("set_cuda_schedule(str schedule, int team) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels_simt, CPU, m) {
  m.impl("sample", TORCH_BOX(&specdec::sample));
  m.impl("verify_chain", TORCH_BOX(&specdec::verify_chain));
}

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels_simt, CompositeExplicitAutograd, m) {
  m.impl("set_cuda_schedule", TORCH_BOX(&specdec::set_cuda_schedule));
}
