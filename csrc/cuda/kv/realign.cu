#include "cuda/kv/slots.cuh"
#include "specdec/kv_realign.h"

namespace specdec::cuda {
namespace {

// Moves one lane of a chain, the farthest token first. To load ahead of the stores is safe, because
// no slot is read after it was written.
template <class Lane>
__device__ void move_chain(const KvShift& shift, int64_t chain, int64_t slot_stride, char* lane) {
  if (chain >= shift.size) return;
  const auto at = [&](int64_t distance) {
    return reinterpret_cast<Lane*>(lane + shift.slot(distance) * slot_stride);
  };
  const int64_t tokens = (shift.size - 1 - chain) / shift.step + 1;
  for (int64_t last = tokens - 1; last >= 0; last -= kHeld) {
    Lane held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (last - i >= 0) held[i] = *at(chain + (last - i) * shift.step);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (last - i >= 0) *at(chain + (last - i + 1) * shift.step) = held[i];
    }
  }
}

// Grid: x over the lanes of the chains of one sequence, y over caches, z over sequences.
template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    realign_kernel(const __grid_constant__ Table<Capacity> table,
                   const KvVector<const int64_t> starts, const KvVector<const int64_t> lengths,
                   const KvVector<const int64_t> shifts, bool zero_fill, int64_t batch) {
  const Job& job = table.jobs[blockIdx.y];
  const KvTensor& t = job.tensor;
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const KvShift shift = realigned(starts[b], lengths[b], shifts[b], t.slots);
    char* const cache = t.cache + b * t.cache_stride.sequence;
    with_lane(job.lane_bytes, [&](auto lane) {
      using Lane = decltype(lane);
      for_each_lane<Lane>(t, shift.left, [&](int64_t head, int64_t chain, int64_t byte) {
        char* const at = cache + head * t.cache_stride.head + byte;
        move_chain<Lane>(shift, chain, t.cache_stride.slot, at);
        if (zero_fill) {
          *reinterpret_cast<Lane*>(at + shift.slot(chain) * t.cache_stride.slot) = Lane{};
        }
      });
    });
  }
}

}  // namespace

int kv_realign(const KvRealignParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  const auto kernel = [](auto capacity) { return realign_kernel<decltype(capacity)::value>; };
  return launch_all(p.tensors, p.num_tensors, p.batch, p.batch, stream, typical_rows, kernel,
                    p.starts, p.lengths, p.shifts, p.zero_fill);
}

}  // namespace specdec::cuda
