// The ops as csrc/torch binds them, served by the CUDA source on CPU tensors, under a name of their
// own; for tests/test_simt_ops.py.
#include <cstring>

#include "../../csrc/torch/chain.cpp"
#include "../../csrc/torch/chain_arguments.cpp"
#include "../../csrc/torch/checks.cpp"
#include "../../csrc/torch/draft_arguments.cpp"
#include "../../csrc/torch/provider.cpp"
#include "../../csrc/torch/sample.cpp"
#include "../../csrc/torch/tree.cpp"
#include "../../csrc/torch/tree_arguments.cpp"
#include "../../csrc/torch/verify_arguments.cpp"
#include "cuda/launch.cuh"
#include "cuda_runtime.h"
#include "torch/schemas.h"

namespace specdec {

// What a workspace holds before a launch: one word over and over.
static uint64_t workspace_word = ~uint64_t{0};
// Of the last launch.
static CudaPlan last_plan = {};

// No CUDA device: every tensor is on the CPU, and this stands where the CPU kernels would.
template <class Params>
void run_in_shim(const Params& p, int (*plan)(const Params&, const CudaRequest&, CudaPlan*),
                 int (*launch)(const Params&, const CudaPlan&, void*, void*)) {
  CudaPlan how = {};
  int status = plan(p, cuda_request(), &how);
  last_plan = how;
  std::vector<uint64_t> words((how.workspace_bytes + 7) / 8 + 2, workspace_word);
  auto* const workspace = reinterpret_cast<unsigned char*>(words.data());
  unsigned char* const end = workspace + how.workspace_bytes;
  std::memset(end, 0xff, 16);
  if (status == 0) status = launch(p, how, workspace, nullptr);
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

void verify_tree_cpu(const TreeParams& p, const Parallel&) {
  run_in_shim(p, plan_verify_tree_cuda, verify_tree_cuda);
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

extern "C" __attribute__((visibility("default"))) void simt_workspace(uint64_t word) {
  specdec::workspace_word = word;
}

// Bytes of the workspace, teams, blocks a team, teams a row, row-parallel.
static void write_plan(const specdec::CudaPlan& plan, int64_t* out) {
  out[0] = plan.workspace_bytes;
  out[1] = plan.teams;
  out[2] = plan.team;
  out[3] = plan.parts;
  out[4] = plan.parallel;
}

extern "C" __attribute__((visibility("default"))) void simt_last_plan(int64_t* out) {
  write_plan(specdec::last_plan, out);
}

extern "C" __attribute__((visibility("default"))) uint64_t simt_next_launch() {
  return specdec::next_launch();
}

// What a device would be asked for: multiprocessors, how many teams of 1, 2, 4 and 8 blocks it
// runs.
extern "C" __attribute__((visibility("default"))) void simt_plan(const int32_t* device,
                                                                 int64_t sequences, int64_t rows,
                                                                 int64_t spans, int64_t* out) {
  specdec::Device d = {device[0], device[2] > 0, {device[1], device[2], device[3], device[4]}};
  write_plan(specdec::make_plan(specdec::cuda_request(), d, sequences, rows, spans, true), out);
}

STABLE_TORCH_LIBRARY(specdec_kernels_simt, m) {
  m.def(specdec::kSampleSchema);
  m.def(specdec::kVerifyChainSchema);
  m.def(specdec::kVerifyTreeSchema);
  m.def("set_cuda_schedule(str schedule, int team) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels_simt, CPU, m) {
  m.impl("sample", TORCH_BOX(&specdec::sample));
  m.impl("verify_chain", TORCH_BOX(&specdec::verify_chain));
  m.impl("verify_tree", TORCH_BOX(&specdec::verify_tree));
}

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels_simt, CompositeExplicitAutograd, m) {
  m.impl("set_cuda_schedule", TORCH_BOX(&specdec::set_cuda_schedule));
}
