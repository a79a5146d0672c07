#include "cuda/kv/slots.cuh"
#include "specdec/paged_truncate.h"

namespace specdec::cuda {
namespace {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// One warp for each sequence: each lane takes a column of the block table, and a ballot tells it
// how many freed blocks come before its own.
__global__ void __launch_bounds__(kThreads) paged_truncate_kernel(const PagedTruncateParams p) {
  const int64_t warps = int64_t{gridDim.x} * (kThreads / kLanes);
  const unsigned lane = threadIdx.x % kLanes;
  for (int64_t b = int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes; b < p.batch;
       b += warps) {
    const int64_t length = p.lengths[b], new_length = p.new_lengths[b];
    const KvRange freed = freed_columns(length, new_length, p.block_size, p.tables.columns);
    const int64_t out = b * p.tables.columns;
    int64_t count = 0;
    for (int64_t first = 0; first < freed.size; first += kLanes) {
      const int64_t column = freed.begin + first + lane;
      const bool inside = first + lane < freed.size;
      const int64_t block = inside ? p.tables.at(b, column) : -1;
      const unsigned kept = __ballot_sync(kAllLanes, block >= 0);
      if (block >= 0) p.blocks.set(out + count + __popc(kept & ((1u << lane) - 1)), block);
      if (inside) p.tables.set(b, column, -1);
      count += __popc(kept);
    }
    for (int64_t i = count + lane; i < p.tables.columns; i += kLanes) p.blocks.set(out + i, -1);
    __syncwarp();  // every lane has read the length
    if (lane == 0) {
      p.num_freed[b] = static_cast<int32_t>(count);
      p.lengths.set(b, truncated_length(length, new_length));
    }
  }
}

}  // namespace

int paged_truncate(const PagedTruncateParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  const int64_t blocks = std::min(blocks_for(p.batch * kLanes), kMaxBlocksPerSequence);
  const cudaLaunchConfig_t config = launch_config(dim3(static_cast<unsigned>(blocks)), stream);
  return cudaLaunchKernelEx(&config, paged_truncate_kernel, p);
}

}  // namespace specdec::cuda
