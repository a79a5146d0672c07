// `sample`, the verifiers and `ngram_propose` as csrc/torch registers them, but with the CUDA
// kernels behind the CPU dispatch key: tests/simt runs those on CPU tensors. For
// tests/simt/emulator.py.
#include <cstring>

#define SPECDEC_LIBRARY specdec_kernels_simt
#define SPECDEC_WITH_CUDA  // for the size of a workspace

#include "../../csrc/arguments/chain.cpp"
#include "../../csrc/arguments/checks.cpp"
#include "../../csrc/arguments/draft.cpp"
#include "../../csrc/arguments/kept_tokens.cpp"
#include "../../csrc/arguments/memory.cpp"
#include "../../csrc/arguments/penalties.cpp"
#include "../../csrc/arguments/run.cpp"
#include "../../csrc/arguments/sample.cpp"
#include "../../csrc/arguments/tree.cpp"
#include "../../csrc/arguments/verification.cpp"
#include "../../csrc/torch/cuda_stream.cpp"
#include "../../csrc/torch/ops/apply_penalties.cpp"
#include "../../csrc/torch/ops/kept_tokens.cpp"
#include "../../csrc/torch/ops/ngram_propose.cpp"
#include "../../csrc/torch/ops/sample.cpp"
#include "../../csrc/torch/ops/verify_chain.cpp"
#include "../../csrc/torch/ops/verify_tree.cpp"
#include "../../csrc/torch/tensor.cpp"
#include "cuda/launch.cuh"
#include "cuda_runtime.h"
#include "row_parts.h"

namespace specdec {

// Before a launch the workspace is filled with this word.
static uint64_t workspace_word = ~uint64_t{0};
// How many bytes of the workspace the last launch wrote.
static int64_t last_written = 0;
static int64_t last_bytes = 0;            // the size of that workspace
static std::vector<uint64_t> last_words;  // of the workspace after it
static uintptr_t last_address = 0;        // where it lay

// A workspace of the caller, in which launches then work as it is.
static unsigned char* own_workspace = nullptr;
static int64_t own_bytes = 0;

static void check_launch(int status) {
  SPECDEC_CHECK(status == 0, "the CUDA kernel launch failed: ", cuda::describe_error(status));
}

// No CUDA device: every tensor is on the CPU, and these functions take the place of the CPU
// kernels.
template <class OpParams>
void run_in_shim(const OpParams& p, int (*launch)(const OpParams&, void*, void*)) {
  const int64_t bytes = cuda::workspace_bytes(p);
  if (own_workspace != nullptr) {
    SPECDEC_CHECK(bytes <= own_bytes, "a workspace of ", own_bytes, " bytes lacks ", bytes);
    return check_launch(launch(p, own_workspace, nullptr));
  }
  std::vector<uint64_t> words((bytes + 7) / 8 + 2, workspace_word);
  auto* const workspace = reinterpret_cast<unsigned char*>(words.data());
  unsigned char* const end = workspace + bytes;
  std::memset(end, 0xff, 16);
  const int status = launch(p, workspace, nullptr);
  last_bytes = bytes;
  last_written = 0;
  for (int64_t i = 0; i < bytes; ++i) {
    last_written += workspace[i] != reinterpret_cast<unsigned char*>(&workspace_word)[i % 8];
  }
  last_words.assign(words.begin(), words.end());
  last_address = reinterpret_cast<uintptr_t>(workspace);
  for (int i = 0; i < 16; ++i) SPECDEC_CHECK(end[i] == 0xff, "written beyond the workspace");
  check_launch(status);
}

namespace cpu {

void sample(const SampleParams& p, const Parallel&) { run_in_shim(p, cuda::sample); }

void kept_tokens(const KeptTokensParams& p, const Parallel&) { run_in_shim(p, cuda::kept_tokens); }

void verify_chain(const ChainParams& p, const Parallel&) { run_in_shim(p, cuda::verify_chain); }

void verify_tree(const TreeParams& p, const Parallel&) { run_in_shim(p, cuda::verify_tree); }

void apply_penalties(const PenaltyParams& p, const Parallel&) {
  check_launch(cuda::apply_penalties(p, nullptr));
}

void ngram_propose(const NgramProposeParams& p, const Parallel&) {
  check_launch(cuda::ngram_propose(p, nullptr));
}

}  // namespace cpu

Parallel torch_parallel() { return serial(); }

}  // namespace specdec

SPECDEC_EXPORT void simt_order(bool reverse, uint64_t seed, unsigned blocks) {
  simt::reverse = reverse;
  simt::shuffle_seed = seed;
  simt::blocks_at_once = blocks;
}

SPECDEC_EXPORT void simt_device(int multiprocessors) { simt::multiprocessors = multiprocessors; }

// Leaves `pending` as the last error, and returns what it was.
SPECDEC_EXPORT int simt_last_error(int pending) {
  const cudaError_t last = cudaGetLastError();
  simt::last_error = static_cast<cudaError_t>(pending);
  return last;
}

// The CUDA version that the driver supports, as cudaDriverGetVersion gives it.
SPECDEC_EXPORT void simt_driver(int version) { simt::driver_version = version; }

SPECDEC_EXPORT void simt_workspace(uint64_t word) { specdec::workspace_word = word; }

SPECDEC_EXPORT void simt_own_workspace(unsigned char* workspace, int64_t bytes) {
  specdec::own_workspace = workspace;
  specdec::own_bytes = bytes;
}

SPECDEC_EXPORT int64_t simt_last_bytes() { return specdec::last_bytes; }

SPECDEC_EXPORT int64_t simt_last_written() { return specdec::last_written; }

// From the first line of 64 bytes on, where the arrays of a call begin.
SPECDEC_EXPORT void simt_words_at(int64_t byte, int64_t n, uint64_t* out) {
  byte += (64 - specdec::last_address % 64) % 64;
  std::copy_n(specdec::last_words.begin() + byte / 8, n, out);
}

SPECDEC_EXPORT uint64_t simt_next_launch() { return specdec::cuda::next_launch_id(); }
