// `sample`, the verifiers and `ngram_propose` as csrc/torch registers them, but with the CUDA
// kernels behind the CPU dispatch key: tests/simt runs those on CPU tensors. For
// tests/simt/emulator.py.
#include <cstring>

#define SPECDEC_LIBRARY specdec_kernels_simt

#include "../../csrc/arguments/chain.cpp"
#include "../../csrc/arguments/checks.cpp"
#include "../../csrc/arguments/draft.cpp"
#include "../../csrc/arguments/sample.cpp"
#include "../../csrc/arguments/tree.cpp"
#include "../../csrc/arguments/verification.cpp"
#include "../../csrc/torch/ops/ngram_propose.cpp"
#include "../../csrc/torch/ops/sample.cpp"
#include "../../csrc/torch/ops/verify_chain.cpp"
#include "../../csrc/torch/ops/verify_tree.cpp"
#include "../../csrc/torch/schedule.cpp"
#include "../../csrc/torch/tensor.cpp"
#include "cuda/chain/view.cuh"
#include "cuda/launch.cuh"
#include "cuda_runtime.h"
#include "row_parts.h"

namespace specdec {

// Before a launch the workspace is filled with this word.
static uint64_t workspace_word = ~uint64_t{0};
// The kernel of the last call of verify_chain, a cuda::Variant.
static int last_variant = -1;
// How many bytes of the workspace the last launch wrote.
static int64_t last_written = 0;
static std::vector<uint64_t> last_words;  // of the workspace after it

static void check_launch(int status) {
  SPECDEC_CHECK(status == 0, "the CUDA kernel launch failed: ", cuda::describe_error(status));
}

// No CUDA device: every tensor is on the CPU, and these functions take the place of the CPU
// kernels.
template <class OpParams>
void run_in_shim(const OpParams& p, int (*plan)(const OpParams&, const CudaRequest&, CudaPlan*),
                 int (*launch)(const OpParams&, const CudaPlan&, void*, void*)) {
  CudaPlan how = {};
  int status = plan(p, cuda_request(), &how);
  last_cuda_plan() = how;
  std::vector<uint64_t> words((how.workspace_bytes + 7) / 8 + 2, workspace_word);
  auto* const workspace = reinterpret_cast<unsigned char*>(words.data());
  unsigned char* const end = workspace + how.workspace_bytes;
  std::memset(end, 0xff, 16);
  if (status == 0) status = launch(p, how, workspace, nullptr);
  last_written = 0;
  for (int64_t i = 0; i < how.workspace_bytes; ++i) {
    last_written += workspace[i] != reinterpret_cast<unsigned char*>(&workspace_word)[i % 8];
  }
  last_words.assign(words.begin(), words.end());
  for (int i = 0; i < 16; ++i) SPECDEC_CHECK(end[i] == 0xff, "written beyond the workspace");
  check_launch(status);
}

namespace cpu {

void sample(const SampleParams& p, const Parallel&) {
  run_in_shim(p, cuda::plan_sample, cuda::sample);
}

void verify_chain(const ChainParams& p, const Parallel&) {
  last_variant = static_cast<int>(cuda::variant_of(p));
  run_in_shim(p, cuda::plan_verify_chain, cuda::verify_chain);
}

void verify_tree(const TreeParams& p, const Parallel&) {
  run_in_shim(p, cuda::plan_verify_tree, cuda::verify_tree);
}

void ngram_propose(const NgramProposeParams& p, const Parallel&) {
  check_launch(cuda::ngram_propose(p, nullptr));
}

}  // namespace cpu

Parallel torch_parallel() { return serial(); }

}  // namespace specdec

extern "C" __attribute__((visibility("default"))) void simt_order(bool reverse, uint64_t seed,
                                                                  unsigned clusters) {
  simt::reverse = reverse;
  simt::shuffle_seed = seed;
  simt::clusters_at_once = clusters;
}

extern "C" __attribute__((visibility("default"))) void simt_device(int multiprocessors,
                                                                   int capability) {
  simt::multiprocessors = multiprocessors;
  simt::capability_major = capability;
}

extern "C" __attribute__((visibility("default"))) void simt_partition(unsigned largest_cluster) {
  simt::largest_cluster = largest_cluster;
}

// Leaves `pending` as the last error, and returns what it was.
extern "C" __attribute__((visibility("default"))) int simt_last_error(int pending) {
  const cudaError_t last = cudaGetLastError();
  simt::last_error = static_cast<cudaError_t>(pending);
  return last;
}

// The CUDA version that the driver supports, as cudaDriverGetVersion gives it.
extern "C" __attribute__((visibility("default"))) void simt_driver(int version) {
  simt::driver_version = version;
}

extern "C" __attribute__((visibility("default"))) void simt_workspace(uint64_t word) {
  specdec::workspace_word = word;
}

// In the order of `Plan` in tests/simt/emulator.py.
static void write_plan(const specdec::CudaPlan& plan, int64_t* out) {
  out[0] = plan.workspace_bytes;
  out[1] = plan.groups;
  out[2] = plan.group_size;
  out[3] = plan.splits;
  out[4] = plan.parallel;
}

extern "C" __attribute__((visibility("default"))) int simt_last_variant() {
  return specdec::last_variant;
}

extern "C" __attribute__((visibility("default"))) int64_t simt_last_written() {
  return specdec::last_written;
}

extern "C" __attribute__((visibility("default"))) void simt_first_words(int64_t n, uint64_t* out) {
  std::copy_n(specdec::last_words.begin(), n, out);
}

extern "C" __attribute__((visibility("default"))) uint64_t simt_next_launch() {
  return specdec::cuda::next_launch_id();
}

// The plan for a device of so many multiprocessors, which runs device[n] groups of n blocks at
// once.
extern "C" __attribute__((visibility("default"))) void simt_plan(const int32_t* device,
                                                                 int64_t sequences, int64_t rows,
                                                                 int64_t warp_tiles, bool again,
                                                                 bool tests, bool drafts,
                                                                 int64_t* out) {
  specdec::cuda::Device d = {device[0], device[1], device[2] > 0, {}};
  std::copy_n(device + 1, specdec::cuda::kMaxGroupSize, d.groups + 1);
  const specdec::cuda::Work work = {sequences, rows, warp_tiles, again, tests, drafts};
  write_plan(specdec::cuda::make_plan(specdec::cuda_request(), d, work), out);
}
