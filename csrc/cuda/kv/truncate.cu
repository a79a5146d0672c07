#include "cuda/kv/slots.cuh"

namespace specdec::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    lengths_kernel(KvVector<void> lengths, KvVector<const void> new_lengths, int64_t batch) {
  const int64_t b = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (b < batch) lengths.set(b, truncated_length(lengths[b], new_lengths[b]));
}

}  // namespace

// The new lengths are written by a second launch, because every block that zeroes slots needs the
// old ones. One launch for both would take either a single block for each sequence, which leaves
// the device idle at small batches, or a counter in memory that has to be allocated.
int kv_truncate(const KvTruncateParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  const cudaError_t status = launch_zero<dropped_slots>(p, stream);
  if (status != cudaSuccess) return status;
  const cudaLaunchConfig_t config =
      launch_config(dim3(static_cast<unsigned>(blocks_for(p.batch))), stream);
  return cudaLaunchKernelEx(&config, lengths_kernel, p.lengths, p.new_lengths, p.batch);
}

}  // namespace specdec::cuda
