#include "cuda/kv/slots.cuh"
#include "specdec/paged_append.h"

namespace specdec::cuda {
namespace {

template <int Capacity>
__global__ void __launch_bounds__(kThreads, 6)
    paged_append_kernel(const __grid_constant__ Table<Capacity> table, const PagedAppendParams p,
                        int64_t batch) {
  const Job& job = table.jobs[blockIdx.y];
  const KvTensor& t = job.tensor;
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const int64_t position = p.positions[b];
    const KvRange kept = p.kept(t, b);
    const char* const entries = t.entries + b * t.entry_stride.sequence;
    with_word(job.word_bytes, [&](auto word) {
      using Word = decltype(word);
      for_each_word<Word>(t, kept.size, [&](int64_t head, int64_t i, int64_t byte) {
        const int64_t entry = kept.begin + i;
        int64_t place;
        if (!p.slots.locate(t, b, position + entry, &place)) return;
        *reinterpret_cast<Word*>(t.cache + place + head * t.cache_stride.head + byte) =
            *reinterpret_cast<const Word*>(entries + head * t.entry_stride.head +
                                           entry * t.entry_stride.slot + byte);
      });
    });
  }
}

}  // namespace

int paged_append(const PagedAppendParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  const auto slots = [](const KvTensor& t) { return t.count; };
  const int64_t sequences = std::max(p.slots.num_blocks, p.batch);  // of a cache, of its entries
  const auto kernel = [](auto capacity) { return paged_append_kernel<decltype(capacity)::value>; };
  return launch_all(p.tensors, p.num_tensors, sequences, p.batch, stream, slots, kernel, p);
}

}  // namespace specdec::cuda
