#pragma once
// What the cache kernels share: the caches of a launch, the lanes of a cache, how work is launched.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "specdec/kv.h"

namespace specdec::cuda {

constexpr int kThreads = 256;
// Enough blocks for any device; what is left over, the grid-stride loop takes.
constexpr int64_t kMaxBlocksPerSequence = 1024;
constexpr int64_t kMaxGridZ = 65535;
// How many slots are dropped or left is known on the device alone; a round drops a few.
constexpr int64_t kTypicalRows = 8;
// Tokens that a thread holds at once: their loads do not wait for one another.
constexpr int kHeld = 4;

struct Job {
  KvTensor tensor;
  int64_t lane_bytes;  // what one thread moves at once: 16, 8, 4, 2 or 1
};

// The caches of one launch travel as a kernel parameter: no device memory to allocate or to copy
// to, and a CUDA graph keeps its own copy. Two sizes, because a launch copies the whole table.
template <int Capacity>
struct Table {
  Job jobs[Capacity];
};
constexpr int kSmallTable = 64, kLargeTable = 256;
static_assert(sizeof(Table<kLargeTable>) + 256 <= 32764, "CUDA's limit on kernel parameters");

// The widest lane that divides every address of the tensor. A stride nobody steps along does not
// count: PyTorch leaves anything there.
inline int64_t lane_bytes(const KvTensor& t, int64_t sequences) {
  uint64_t bits = 16 | reinterpret_cast<uintptr_t>(t.cache) |
                  reinterpret_cast<uintptr_t>(t.entries) | static_cast<uint64_t>(t.row_bytes);
  if (sequences > 1) bits |= t.cache_stride.sequence | t.entry_stride.sequence;
  if (t.heads > 1) bits |= t.cache_stride.head | t.entry_stride.head;
  if (t.slots > 1) bits |= t.cache_stride.slot;
  if (t.count > 1) bits |= t.entry_stride.slot;
  return static_cast<int64_t>(bits & (~bits + 1));
}

template <class F>
__device__ void with_lane(int64_t bytes, F f) {
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

// f(head, row, byte) for every lane of [heads, rows, row_bytes], spread over grid x. Unsigned,
// because the compiler's 64-bit division then takes a short path for small operands.
template <class Lane, class F>
__device__ void for_each_lane(const KvTensor& t, int64_t rows, F f) {
  const uint64_t lanes = static_cast<uint64_t>(t.row_bytes) / sizeof(Lane);
  const uint64_t num_rows = static_cast<uint64_t>(rows);
  const uint64_t total = static_cast<uint64_t>(t.heads) * num_rows * lanes;
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total; i += step) {
    const uint64_t row = i / lanes, head = row / num_rows;
    f(static_cast<int64_t>(head), static_cast<int64_t>(row - head * num_rows),
      static_cast<int64_t>((i - row * lanes) * sizeof(Lane)));
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

// One launch for each `Capacity` caches of so many sequences or blocks, with grid z over the batch;
// rows_of(tensor) is how many rows a head moves.
template <int Capacity, class RowsOf, class Kernel, class... Args>
cudaError_t launch_jobs(const KvTensor* tensors, int64_t num_tensors, int64_t sequences,
                        int64_t batch, void* stream, RowsOf rows_of, Kernel kernel, Args... args) {
  for (int64_t first = 0; first < num_tensors; first += Capacity) {
    const int64_t size = std::min<int64_t>(num_tensors - first, Capacity);
    Table<Capacity> table;
    int64_t blocks = 0;
    for (int64_t i = 0; i < size; ++i) {
      const KvTensor& t = tensors[first + i];
      const int64_t bytes = lane_bytes(t, sequences);
      table.jobs[i] = {t, bytes};
      blocks = std::max(blocks, blocks_for(t.heads * rows_of(t) * (t.row_bytes / bytes)));
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

// kernel_of(capacity) is the kernel for tables of so many caches.
template <class RowsOf, class KernelOf, class... Args>
cudaError_t launch_all(const KvTensor* tensors, int64_t num_tensors, int64_t sequences,
                       int64_t batch, void* stream, RowsOf rows_of, KernelOf kernel_of,
                       Args... args) {
  constexpr std::integral_constant<int, kSmallTable> few;
  constexpr std::integral_constant<int, kLargeTable> many;
  return num_tensors <= kSmallTable
             ? launch_jobs<kSmallTable>(tensors, num_tensors, sequences, batch, stream, rows_of,
                                        kernel_of(few), args...)
             : launch_jobs<kLargeTable>(tensors, num_tensors, sequences, batch, stream, rows_of,
                                        kernel_of(many), args...);
}

inline int64_t typical_rows(const KvTensor& t) { return std::min(t.slots, kTypicalRows); }

// Zeroes dropped(length, new_length, slots), which may go on from the last slot to the first. Grid:
// x over the lanes of one sequence, y over caches, z over sequences.
template <int Capacity, KvRange (*dropped)(int64_t, int64_t, int64_t)>
__global__ void __launch_bounds__(kThreads)
    zero_kernel(const __grid_constant__ Table<Capacity> table, KvVector<const int64_t> lengths,
                KvVector<const int64_t> new_lengths, int64_t batch) {
  const Job& job = table.jobs[blockIdx.y];
  const KvTensor& t = job.tensor;
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const KvRange slots = dropped(lengths[b], new_lengths[b], t.slots);
    char* const cache = t.cache + b * t.cache_stride.sequence;
    with_lane(job.lane_bytes, [&](auto lane) {
      using Lane = decltype(lane);
      for_each_lane<Lane>(t, slots.size, [&](int64_t head, int64_t row, int64_t byte) {
        const int64_t at = slots.begin + row, slot = at < t.slots ? at : at - t.slots;
        *reinterpret_cast<Lane*>(cache + head * t.cache_stride.head + slot * t.cache_stride.slot +
                                 byte) = Lane{};
      });
    });
  }
}

template <KvRange (*dropped)(int64_t, int64_t, int64_t), class OpParams>
cudaError_t launch_zero(const OpParams& p, void* stream) {
  if (!p.zero_fill) return cudaSuccess;
  const auto kernel = [](auto capacity) { return zero_kernel<decltype(capacity)::value, dropped>; };
  const KvVector<const int64_t> lengths = {p.lengths.data, p.lengths.stride};
  return launch_all(p.tensors, p.num_tensors, p.batch, p.batch, stream, typical_rows, kernel,
                    lengths, p.new_lengths);
}

}  // namespace specdec::cuda
