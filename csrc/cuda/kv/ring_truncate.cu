#include "cuda/kv/slots.cuh"
#include "specdec/ring_truncate.h"

namespace specdec::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) ring_lengths_kernel(const RingTruncateParams p) {
  const int64_t b = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (b >= p.batch) return;
  const int64_t length = p.lengths[b], new_length = p.new_lengths[b];
  p.status[b] = window_is_lost(length, new_length, p.slots, p.window);
  p.lengths.set(b, truncated_length(length, new_length));
}

}  // namespace

// Two launches, for the reason given in truncate.cu.
int ring_truncate(const RingTruncateParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  const cudaError_t status = launch_zero<dropped_ring_slots>(p, stream);
  if (status != cudaSuccess) return status;
  const cudaLaunchConfig_t config =
      launch_config(dim3(static_cast<unsigned>(blocks_for(p.batch))), stream);
  return cudaLaunchKernelEx(&config, ring_lengths_kernel, p);
}

}  // namespace specdec::cuda
