// The op ngram_propose on CUDA devices.
#include "cuda/launch.cuh"
#include "specdec/ngram_propose.h"

namespace specdec::cuda {
namespace {

constexpr int64_t kMaxBlocks = 65536;
// Ends whose tokens a thread loads at once: the loads do not wait for one another.
constexpr int kInFlight = 8;

// The best match that ends in this thread's share of the text.
__device__ uint64_t best_match(const NgramProposeParams& p, int64_t b, int64_t length) {
  uint64_t best = 0;
  if (length < 2) return best;
  const int64_t last = p.history.at(b, length - 1);
  for (int64_t first = thread_id(); first < length - 1; first += kThreads * kInFlight) {
    int64_t tokens[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t end = first + i * kThreads;
      tokens[i] = end < length - 1 ? p.history.at(b, end) : ~last;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (tokens[i] != last) continue;
      const int64_t end = first + i * kThreads;
      const uint64_t key = match_key(match_size(p, b, length, end), end);
      best = key > best ? key : best;
    }
  }
  return best;
}

// One block takes a sequence. It reads each token of the text once, and again, out of the cache,
// those before an end that matches: at least 8 bytes (int64) a token. docs/design/cuda.md says why
// latency should bound a launch.
__global__ void __launch_bounds__(kThreads) ngram_propose_kernel(const NgramProposeParams p) {
  ThreadBlock block(*shared_memory<BlockShared>());
  for (int64_t b = blockIdx.x; b < p.batch; b += gridDim.x) {
    const int64_t length = text_length(p, b);
    const NgramCopy copy(p, length, block.max(best_match(p, b, length)));
    for (int64_t i = thread_id(); i < p.gamma; i += kThreads) {
      p.tokens.set(b * p.gamma + i, copy.token(p, b, i));
    }
    if (thread_id() == 0) p.counts[b] = copy.count(p);
  }
}

}  // namespace

int ngram_propose(const NgramProposeParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  return launch_blocks(ngram_propose_kernel, p, std::min(p.batch, kMaxBlocks), sizeof(BlockShared),
                       stream);
}

}  // namespace specdec::cuda
