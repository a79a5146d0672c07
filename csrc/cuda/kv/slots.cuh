#pragma once
// Shared by the CUDA kernels of the cache ops: the caches of a launch, the words that threads move,
// and the launch itself.
//
// A slot is one token's place in a cache; its entry is what one head keeps there, `entry_bytes`
// long. A word is the part of an entry that one thread moves at once.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "specdec/ring_truncate.h"

namespace specdec::cuda {

constexpr int kThreads = 256;
// Enough blocks to fill any device; larger caches are covered by a grid-stride loop.
constexpr int64_t kMaxBlocksPerSequence = 1024;
constexpr int64_t kMaxGridZ = 65535;
// How many slots are dropped or vacated is known on the device only, so grids are sized for a
// guess: a round of speculative decoding drops a few tokens.
constexpr int64_t kTypicalSlots = 8;
// Words that a thread loads before it stores the first: the loads do not wait for one another.
constexpr int kInFlight = 4;

// One cache of a launch.
struct Job {
  KvTensor tensor;
  int64_t word_bytes;  // 16, 8, 4, 2 or 1
};

// The caches of one launch, passed as a kernel parameter: no device memory has to be allocated or
// copied to, and a CUDA graph keeps its own copy. There are two capacities, because a launch copies
// the whole table.
template <int Capacity>
struct Table {
  Job jobs[Capacity];
};
constexpr int kSmallTable = 64, kLargeTable = 256;
static_assert(sizeof(Table<kLargeTable>) + 256 <= 32764, "CUDA's limit on kernel parameters");

// The widest word that every entry of the tensor is aligned to and divisible by. The stride of a
// dimension of size 1 is ignored, because PyTorch leaves any value there.
inline int64_t word_bytes(const KvTensor& t, int64_t sequences) {
  uint64_t bits = 16 | reinterpret_cast<uintptr_t>(t.cache) |
                  reinterpret_cast<uintptr_t>(t.entries) | static_cast<uint64_t>(t.entry_bytes);
  if (sequences > 1) bits |= t.cache_stride.sequence | t.entry_stride.sequence;
  if (t.heads > 1) bits |= t.cache_stride.head | t.entry_stride.head;
  if (t.slots > 1) bits |= t.cache_stride.slot;
  if (t.count > 1) bits |= t.entry_stride.slot;
  return static_cast<int64_t>(bits & (~bits + 1));
}

// Calls f with a word of the type that has this size.
template <class F>
__device__ void with_word(int64_t bytes, F f) {
  switch (bytes) {
    case 16:
      return f(uint4{});
    case 8:
      return f(uint2{});
    case 4:
      return f(uint32_t{});
    case 2:
      return f(uint16_t{});
    default:
      return f(uint8_t{});
  }
}

// Calls f(head, i, byte) for every word of [heads, slots, entry_bytes], spread over grid x. The
// numbers are unsigned, because 64-bit division is then short for small operands.
template <class Word, class F>
__device__ void for_each_word(const KvTensor& t, int64_t slots, F f) {
  const uint64_t words = static_cast<uint64_t>(t.entry_bytes) / sizeof(Word);
  const uint64_t num_slots = static_cast<uint64_t>(slots);
  const uint64_t total = static_cast<uint64_t>(t.heads) * num_slots * words;
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total; i += step) {
    const uint64_t entry = i / words, head = entry / num_slots;
    f(static_cast<int64_t>(head), static_cast<int64_t>(entry - head * num_slots),
      static_cast<int64_t>((i - entry * words) * sizeof(Word)));
  }
}

inline int64_t blocks_for(int64_t work) { return (work + kThreads - 1) / kThreads; }

inline cudaLaunchConfig_t launch_config(dim3 grid, void* stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  return config;
}

// Launches the kernel once for every `Capacity` caches. `sequences` is the first dimension of the
// caches, which for paged ones counts blocks; `slots_of(tensor)` estimates how many slots of a head
// a sequence moves. Grid: x over words, y over caches, z over the batch.
template <int Capacity, class SlotsOf, class Kernel, class... Args>
cudaError_t launch_jobs(const KvTensor* tensors, int64_t num_tensors, int64_t sequences,
                        int64_t batch, void* stream, SlotsOf slots_of, Kernel kernel,
                        Args... args) {
  for (int64_t first = 0; first < num_tensors; first += Capacity) {
    const int64_t size = std::min<int64_t>(num_tensors - first, Capacity);
    Table<Capacity> table;
    int64_t blocks = 0;
    for (int64_t i = 0; i < size; ++i) {
      const KvTensor& t = tensors[first + i];
      const int64_t bytes = word_bytes(t, sequences);
      table.jobs[i] = {t, bytes};
      blocks = std::max(blocks, blocks_for(t.heads * slots_of(t) * (t.entry_bytes / bytes)));
    }
    if (blocks == 0) continue;
    const dim3 grid(static_cast<unsigned>(std::min(blocks, kMaxBlocksPerSequence)),
                    static_cast<unsigned>(size), static_cast<unsigned>(std::min(batch, kMaxGridZ)));
    const cudaLaunchConfig_t config = launch_config(grid, stream);
    const cudaError_t status = cudaLaunchKernelEx(&config, kernel, table, args..., batch);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// Picks the capacity of the table; kernel_of(capacity) is the kernel for it.
template <class SlotsOf, class KernelOf, class... Args>
cudaError_t launch_all(const KvTensor* tensors, int64_t num_tensors, int64_t sequences,
                       int64_t batch, void* stream, SlotsOf slots_of, KernelOf kernel_of,
                       Args... args) {
  constexpr std::integral_constant<int, kSmallTable> few;
  constexpr std::integral_constant<int, kLargeTable> many;
  return num_tensors <= kSmallTable
             ? launch_jobs<kSmallTable>(tensors, num_tensors, sequences, batch, stream, slots_of,
                                        kernel_of(few), args...)
             : launch_jobs<kLargeTable>(tensors, num_tensors, sequences, batch, stream, slots_of,
                                        kernel_of(many), args...);
}

inline int64_t typical_slots(const KvTensor& t) { return std::min(t.slots, kTypicalSlots); }

// Zeroes the slots dropped(length, new_length, slots) of each sequence. In a ring buffer this range
// may wrap around from the last slot to the first.
template <int Capacity, KvRange (*dropped)(int64_t, int64_t, int64_t)>
__global__ void __launch_bounds__(kThreads)
    zero_kernel(const __grid_constant__ Table<Capacity> table, KvVector<const void> lengths,
                KvVector<const void> new_lengths, int64_t batch) {
  const Job& job = table.jobs[blockIdx.y];
  const KvTensor& t = job.tensor;
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const KvRange slots = dropped(lengths[b], new_lengths[b], t.slots);
    char* const cache = t.cache + b * t.cache_stride.sequence;
    with_word(job.word_bytes, [&](auto word) {
      using Word = decltype(word);
      for_each_word<Word>(t, slots.size, [&](int64_t head, int64_t i, int64_t byte) {
        const int64_t at = slots.begin + i, slot = at < t.slots ? at : at - t.slots;
        *reinterpret_cast<Word*>(cache + head * t.cache_stride.head + slot * t.cache_stride.slot +
                                 byte) = Word{};
      });
    });
  }
}

template <class OpParams>
__global__ void __launch_bounds__(kThreads) lengths_kernel(const OpParams p) {
  const int64_t b = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (b >= p.batch) return;
  const int64_t length = p.lengths[b], new_length = p.new_lengths[b];
  if constexpr (std::is_same_v<OpParams, RingTruncateParams>) {
    p.status[b] = window_is_lost(length, new_length, p.slots, p.window);
  }
  p.lengths.set(b, truncated_length(length, new_length));
}

// The new lengths are written by a second launch, because every block that zeroes slots needs the
// old ones. One launch for both would take either a single block for each sequence, which leaves
// the device idle at small batches, or a counter in memory that has to be allocated.
template <KvRange (*dropped)(int64_t, int64_t, int64_t), class OpParams>
cudaError_t truncate(const OpParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  if (p.zero_fill) {
    const auto kernel = [](auto capacity) {
      return zero_kernel<decltype(capacity)::value, dropped>;
    };
    const KvVector<const void> lengths = {p.lengths.data, p.lengths.are_int64, p.lengths.stride};
    const cudaError_t status = launch_all(p.tensors, p.num_tensors, p.batch, p.batch, stream,
                                          typical_slots, kernel, lengths, p.new_lengths);
    if (status != cudaSuccess) return status;
  }
  const cudaLaunchConfig_t config =
      launch_config(dim3(static_cast<unsigned>(blocks_for(p.batch))), stream);
  return cudaLaunchKernelEx(&config, lengths_kernel<OpParams>, p);
}

}  // namespace specdec::cuda
