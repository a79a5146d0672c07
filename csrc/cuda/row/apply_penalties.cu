// The op apply_penalties_ on CUDA devices, in one launch: a thread takes every so many tokens of a
// sequence and looks at their counts once for all rows, and the first block of a sequence its named
// tokens.
#include "cuda/launch.cuh"
#include "specdec/apply_penalties.h"

namespace specdec::cuda {
namespace {

struct PenaltyJob {
  PenaltyParams p;
  int splits;  // blocks of a sequence
};

// Without a number of blocks ptxas spills a register for sm_120.
__global__ void __launch_bounds__(kThreads, 4) apply_penalties_kernel(const PenaltyJob job) {
  const PenaltyParams& p = job.p;
  const int64_t b = blockIdx.x / static_cast<unsigned>(job.splits);
  const auto split = static_cast<int>(blockIdx.x % static_cast<unsigned>(job.splits));
  const PenalisedSequence s = open_penalties(p, b);
  const bool text = p.counts != nullptr || p.prompt.words != nullptr || !s.in_range();
  const int64_t step = int64_t{job.splits} * kThreads;
  for (int64_t token = split * kThreads + thread_id(); text && token < p.vocab; token += step) {
    apply_to_token(p, s, token);
  }
  for (int64_t k = thread_id(); split == 0 && s.in_range() && k < p.named(); k += kThreads) {
    apply_to_named(p, s, k);
  }
}

}  // namespace

int apply_penalties(const PenaltyParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  int processors = 0;
  const cudaError_t status = multiprocessors(&processors);
  if (status != cudaSuccess) return status;
  PenaltyJob job = {p, 1};
  job.splits = splits_of(processors, p.batch, warp_tiles_of(p.vocab));
  return launch_blocks(apply_penalties_kernel, job, p.batch * job.splits, 0, stream);
}

}  // namespace specdec::cuda
