#include "cuda/kv/slots.cuh"
#include "specdec/kv_realign.h"

namespace specdec::cuda {
namespace {

// Moves one word of every token of a chain (see KvShift), the farthest token first. Loads may run
// ahead of stores, because no slot is read after it was written.
template <class Word>
__device__ void move_chain(const KvShift& shift, int64_t chain, int64_t slot_stride, char* word) {
  if (chain >= shift.size) return;
  const auto at = [&](int64_t distance) {
    return reinterpret_cast<Word*>(word + shift.slot(distance) * slot_stride);
  };
  const int64_t tokens = (shift.size - 1 - chain) / shift.step + 1;
  for (int64_t last = tokens - 1; last >= 0; last -= kInFlight) {
    Word words[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (last - i >= 0) words[i] = *at(chain + (last - i) * shift.step);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (last - i >= 0) *at(chain + (last - i + 1) * shift.step) = words[i];
    }
  }
}

// There are as many chains as slots that the shift vacates.
template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    realign_kernel(const __grid_constant__ Table<Capacity> table, const KvVector<const void> starts,
                   const KvVector<const void> lengths, const KvVector<const void> shifts,
                   bool zero_fill, int64_t batch) {
  const Job& job = table.jobs[blockIdx.y];
  const KvTensor& t = job.tensor;
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const KvShift shift = realigned(starts[b], lengths[b], shifts[b], t.slots);
    char* const cache = t.cache + b * t.cache_stride.sequence;
    with_word(job.word_bytes, [&](auto word) {
      using Word = decltype(word);
      for_each_word<Word>(t, shift.vacated, [&](int64_t head, int64_t chain, int64_t byte) {
        char* const at = cache + head * t.cache_stride.head + byte;
        move_chain<Word>(shift, chain, t.cache_stride.slot, at);
        if (zero_fill) {
          *reinterpret_cast<Word*>(at + shift.slot(chain) * t.cache_stride.slot) = Word{};
        }
      });
    });
  }
}

}  // namespace

int kv_realign(const KvRealignParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  const auto kernel = [](auto capacity) { return realign_kernel<decltype(capacity)::value>; };
  return launch_all(p.tensors, p.num_tensors, p.batch, p.batch, stream, typical_slots, kernel,
                    p.starts, p.lengths, p.shifts, p.zero_fill);
}

}  // namespace specdec::cuda
