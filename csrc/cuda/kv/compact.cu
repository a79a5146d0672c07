#include "cuda/kv/slots.cuh"
#include "specdec/kv_compact.h"

namespace specdec::cuda {
namespace {

// Moves one lane of every token of a path. To load ahead of the stores is safe, because no slot is
// read after it was written.
template <class Lane, class Slots>
__device__ void move_along(PathMoves<Slots> walk, char* lane) {
  for (bool more = true; more;) {
    Lane held[kHeld];
    int64_t to[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      KvMove move = {};
      more = more && walk.next(&move);
      to[i] = more ? move.to : -1;
      if (more) held[i] = *reinterpret_cast<const Lane*>(lane + move.from);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (to[i] >= 0) *reinterpret_cast<Lane*>(lane + to[i]) = held[i];
    }
  }
}

// Grid: x over the lanes of one token, y over caches, z over sequences.
template <int Capacity, class Slots>
__global__ void __launch_bounds__(kThreads, 2)
    compact_kernel(const __grid_constant__ Table<Capacity> table, const Slots slots,
                   const KvVector<const int64_t> base, const KvPath path, int64_t batch) {
  const Job& job = table.jobs[blockIdx.y];
  const KvTensor& t = job.tensor;
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const PathMoves<Slots> walk(slots, path, t, b, base[b]);
    with_lane(job.lane_bytes, [&](auto lane) {
      using Lane = decltype(lane);
      for_each_lane<Lane>(t, 1, [&](int64_t head, int64_t, int64_t byte) {
        move_along<Lane>(walk, t.cache + head * t.cache_stride.head + byte);
      });
    });
  }
}

template <class Slots>
int compact(const KvCompactParams& p, const Slots& slots, int64_t sequences, void* stream) {
  if (p.batch == 0 || p.path.length == 0) return cudaSuccess;
  const auto rows = [](const KvTensor&) { return int64_t{1}; };
  const auto kernel = [](auto capacity) {
    return compact_kernel<decltype(capacity)::value, Slots>;
  };
  return launch_all(p.tensors, p.num_tensors, sequences, p.batch, stream, rows, kernel, slots,
                    p.base, p.path);
}

}  // namespace

int kv_compact(const KvCompactParams& p, void* stream) {
  return compact(p, DenseSlots{}, p.batch, stream);
}

int paged_compact(const PagedCompactParams& p, void* stream) {
  return compact(p.compact, p.slots, p.slots.num_blocks, stream);
}

}  // namespace specdec::cuda
