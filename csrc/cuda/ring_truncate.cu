#include "cuda/kv.cuh"
#include "specdec/ring_truncate.h"

namespace specdec {
namespace {

// Grid: x over the lanes of one sequence, y over caches, z over sequences.
template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    zero_ring_kernel(const __grid_constant__ Table<Capacity> table, KvVector<const int64_t> lengths,
                     KvVector<const int64_t> new_lengths, int64_t batch) {
  const Job& job = table.jobs[blockIdx.y];
  const KvTensor& t = job.tensor;
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const KvRange dropped = dropped_tokens(lengths[b], new_lengths[b], t.slots);
    const int64_t first = dropped.begin % t.slots;
    char* const cache = t.cache + b * t.cache_stride.sequence;
    with_lane(job.lane_bytes, [&](auto lane) {
      using Lane = decltype(lane);
      for_each_lane<Lane>(t, dropped.size, [&](int64_t head, int64_t row, int64_t byte) {
        const int64_t slot = first + row < t.slots ? first + row : first + row - t.slots;
        *reinterpret_cast<Lane*>(cache + head * t.cache_stride.head + slot * t.cache_stride.slot +
                                 byte) = Lane{};
      });
    });
  }
}

__global__ void __launch_bounds__(kThreads) ring_lengths_kernel(const RingTruncateParams p) {
  const int64_t b = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (b >= p.batch) return;
  const int64_t length = p.lengths[b], new_length = p.new_lengths[b];
  p.status[b] = window_is_lost(length, new_length, p.slots, p.window);
  p.lengths[b] = truncated_length(length, new_length);
}

}  // namespace

// Two launches, as kv_truncate_ has them and for its reason.
int ring_truncate_cuda(const RingTruncateParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  if (p.zero_fill) {
    const auto rows = [](const KvTensor& t) { return std::min(t.slots, kTypicalRows); };
    const KvVector<const int64_t> lengths = {p.lengths.data, p.lengths.stride};
    const cudaError_t status =
        p.num_tensors <= kSmallTable
            ? launch_jobs<kSmallTable>(p.tensors, p.num_tensors, p.batch, p.batch, stream, rows,
                                       zero_ring_kernel<kSmallTable>, lengths, p.new_lengths)
            : launch_jobs<kLargeTable>(p.tensors, p.num_tensors, p.batch, p.batch, stream, rows,
                                       zero_ring_kernel<kLargeTable>, lengths, p.new_lengths);
    if (status != cudaSuccess) return status;
  }
  const cudaLaunchConfig_t config =
      launch_config(dim3(static_cast<unsigned>(blocks_for(p.batch))), stream);
  return cudaLaunchKernelEx(&config, ring_lengths_kernel, p);
}

}  // namespace specdec
