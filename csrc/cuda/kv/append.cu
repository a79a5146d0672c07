#include "cuda/kv/slots.cuh"

namespace specdec::cuda {
namespace {

template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ Table<Capacity> table, KvVector<const void> positions,
                  int64_t batch) {
  const Job& job = table.jobs[blockIdx.y];
  const KvTensor& t = job.tensor;
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const int64_t position = positions[b];
    const KvRange kept = kept_entries(position, t.count, t.slots);
    char* const cache = t.cache + b * t.cache_stride.sequence;
    const char* const entries = t.entries + b * t.entry_stride.sequence;
    with_word(job.word_bytes, [&](auto word) {
      using Word = decltype(word);
      for_each_word<Word>(t, kept.size, [&](int64_t head, int64_t i, int64_t byte) {
        const int64_t entry = kept.begin + i, slot = position + entry;
        *reinterpret_cast<Word*>(cache + head * t.cache_stride.head + slot * t.cache_stride.slot +
                                 byte) =
            *reinterpret_cast<const Word*>(entries + head * t.entry_stride.head +
                                           entry * t.entry_stride.slot + byte);
      });
    });
  }
}

}  // namespace

int kv_append(const KvAppendParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  const auto slots = [](const KvTensor& t) { return t.count; };
  const auto kernel = [](auto capacity) { return append_kernel<decltype(capacity)::value>; };
  return launch_all(p.tensors, p.num_tensors, p.batch, p.batch, stream, slots, kernel, p.positions);
}

}  // namespace specdec::cuda
