#include "cuda/kv/slots.cuh"
#include "specdec/kv_compact.h"

namespace specdec::cuda {
namespace {

// Moves one word of every token of a path. Loads may run ahead of stores, because no slot is read
// after it was written (see PathMoves).
template <class Word, class Slots>
__device__ void move_along(PathMoves<Slots> moves, char* word) {
  for (bool more = true; more;) {
    Word words[kInFlight];
    int64_t to[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      KvMove move = {};
      more = more && moves.next(&move);
      to[i] = more ? move.to : -1;
      if (more) words[i] = *reinterpret_cast<const Word*>(word + move.from);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (to[i] >= 0) *reinterpret_cast<Word*>(word + to[i]) = words[i];
    }
  }
}

template <int Capacity, class Slots>
__global__ void __launch_bounds__(kThreads, 2)
    compact_kernel(const __grid_constant__ Table<Capacity> table, const Slots slots,
                   const KvVector<const void> base, const KvTable<const void> path, int64_t batch) {
  const Job& job = table.jobs[blockIdx.y];
  const KvTensor& t = job.tensor;
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const PathMoves<Slots> moves(slots, path, t, b, base[b]);
    with_word(job.word_bytes, [&](auto word) {
      using Word = decltype(word);
      for_each_word<Word>(t, 1, [&](int64_t head, int64_t, int64_t byte) {
        move_along<Word>(moves, t.cache + head * t.cache_stride.head + byte);
      });
    });
  }
}

template <class Slots>
int compact(const KvCompactParams& p, const Slots& slots, int64_t sequences, void* stream) {
  if (p.batch == 0 || p.path.columns == 0) return cudaSuccess;
  const auto one_slot = [](const KvTensor&) { return int64_t{1}; };
  const auto kernel = [](auto capacity) {
    return compact_kernel<decltype(capacity)::value, Slots>;
  };
  return launch_all(p.tensors, p.num_tensors, sequences, p.batch, stream, one_slot, kernel, slots,
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
