#include <cuda_runtime.h>

#include <algorithm>

#include "specdec/kv.h"

namespace specdec {
namespace {

constexpr int kThreads = 256;
// Enough blocks for any device; what is left over, the grid-stride loop takes.
constexpr int64_t kMaxBlocksPerSequence = 1024;
constexpr int64_t kMaxGridZ = 65535;
// How many slots truncation drops is known on the device alone; a round drops a few.
constexpr int64_t kTypicalDrop = 8;

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
int64_t lane_bytes(const KvTensor& t, int64_t batch) {
  uint64_t bits = 16 | reinterpret_cast<uintptr_t>(t.cache) |
                  reinterpret_cast<uintptr_t>(t.entries) | static_cast<uint64_t>(t.row_bytes);
  if (batch > 1) bits |= t.cache_stride.sequence | t.entry_stride.sequence;
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

// Grid: x over the lanes of one sequence, y over caches, z over sequences.
template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ Table<Capacity> table, KvVector<const int64_t> positions,
                  int64_t batch) {
  const Job& job = table.jobs[blockIdx.y];
  const KvTensor& t = job.tensor;
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const int64_t position = positions[b];
    const KvRange kept = kept_entries(position, t.count, t.slots);
    char* const cache = t.cache + b * t.cache_stride.sequence;
    const char* const entries = t.entries + b * t.entry_stride.sequence;
    with_lane(job.lane_bytes, [&](auto lane) {
      using Lane = decltype(lane);
      for_each_lane<Lane>(t, kept.size, [&](int64_t head, int64_t row, int64_t byte) {
        const int64_t entry = kept.begin + row, slot = position + entry;
        *reinterpret_cast<Lane*>(cache + head * t.cache_stride.head + slot * t.cache_stride.slot +
                                 byte) =
            *reinterpret_cast<const Lane*>(entries + head * t.entry_stride.head +
                                           entry * t.entry_stride.slot + byte);
      });
    });
  }
}

template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    zero_kernel(const __grid_constant__ Table<Capacity> table, KvVector<const int64_t> lengths,
                KvVector<const int64_t> new_lengths, int64_t batch) {
  const Job& job = table.jobs[blockIdx.y];
  const KvTensor& t = job.tensor;
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const KvRange dropped = dropped_slots(lengths[b], new_lengths[b], t.slots);
    char* const cache = t.cache + b * t.cache_stride.sequence + dropped.begin * t.cache_stride.slot;
    with_lane(job.lane_bytes, [&](auto lane) {
      using Lane = decltype(lane);
      for_each_lane<Lane>(t, dropped.size, [&](int64_t head, int64_t row, int64_t byte) {
        *reinterpret_cast<Lane*>(cache + head * t.cache_stride.head + row * t.cache_stride.slot +
                                 byte) = Lane{};
      });
    });
  }
}

__global__ void __launch_bounds__(kThreads)
    lengths_kernel(KvVector<int64_t> lengths, KvVector<const int64_t> new_lengths, int64_t batch) {
  const int64_t b = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (b < batch) lengths[b] = truncated_length(lengths[b], new_lengths[b]);
}

int64_t blocks_for(int64_t work) { return (work + kThreads - 1) / kThreads; }

cudaLaunchConfig_t launch_config(dim3 grid, void* stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  return config;
}

// One launch for each `Capacity` caches; rows_of(tensor) is how many rows a head moves.
template <int Capacity, class RowsOf, class Kernel, class... Args>
cudaError_t launch_jobs(const KvTensor* tensors, int64_t num_tensors, int64_t batch, void* stream,
                        RowsOf rows_of, Kernel kernel, Args... args) {
  for (int64_t first = 0; first < num_tensors; first += Capacity) {
    const int64_t size = std::min<int64_t>(num_tensors - first, Capacity);
    Table<Capacity> table;
    int64_t blocks = 0;
    for (int64_t i = 0; i < size; ++i) {
      const KvTensor& t = tensors[first + i];
      const int64_t bytes = lane_bytes(t, batch);
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

}  // namespace

int kv_append_cuda(const KvAppendParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  const auto rows = [](const KvTensor& t) { return t.count; };
  return p.num_tensors <= kSmallTable
             ? launch_jobs<kSmallTable>(p.tensors, p.num_tensors, p.batch, stream, rows,
                                        append_kernel<kSmallTable>, p.positions)
             : launch_jobs<kLargeTable>(p.tensors, p.num_tensors, p.batch, stream, rows,
                                        append_kernel<kLargeTable>, p.positions);
}

// The new lengths get a launch of their own, after the zeroing in stream order: every zeroing block
// needs the old ones, and to write them in the same launch would take either one block a sequence,
// which leaves the device idle at small batches, or a counter in memory that must be allocated.
int kv_truncate_cuda(const KvTruncateParams& p, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  if (p.zero_fill) {
    const auto rows = [](const KvTensor& t) { return std::min(t.slots, kTypicalDrop); };
    const KvVector<const int64_t> lengths = {p.lengths.data, p.lengths.stride};
    const cudaError_t status =
        p.num_tensors <= kSmallTable
            ? launch_jobs<kSmallTable>(p.tensors, p.num_tensors, p.batch, stream, rows,
                                       zero_kernel<kSmallTable>, lengths, p.new_lengths)
            : launch_jobs<kLargeTable>(p.tensors, p.num_tensors, p.batch, stream, rows,
                                       zero_kernel<kLargeTable>, lengths, p.new_lengths);
    if (status != cudaSuccess) return status;
  }
  const cudaLaunchConfig_t config =
      launch_config(dim3(static_cast<unsigned>(blocks_for(p.batch))), stream);
  return cudaLaunchKernelEx(&config, lengths_kernel, p.lengths, p.new_lengths, p.batch);
}

}  // namespace specdec
