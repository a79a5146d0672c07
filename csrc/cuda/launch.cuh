#pragma once
// Host side of a launch: properties of the device, number and size of the groups, attributes.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <random>

#include "cuda/row/distribution.cuh"
#include "specdec/cuda_plan.h"
#include "specdec/verification.h"

namespace specdec::cuda {

constexpr int kMaxGroupSize = 8;
constexpr int kBlocksPerProcessor = 2;

constexpr int kGroupSizes = 4;  // 1, 2, 4, 8

struct Device {
  int processors;
  bool clusters;  // whether it has thread-block clusters
  // How many groups of 1 << i blocks run at once. These are fewer than the multiprocessors suggest,
  // because a cluster must fit within one GPU processing cluster.
  int groups[kGroupSizes];
};

inline int64_t round_up(int64_t bytes) { return (bytes + 15) / 16 * 16; }

inline int64_t warp_tiles_of(int64_t vocab) { return (vocab + kWarpTile - 1) / kWarpTile; }

// The warp tiles of a target or draft row, whichever is longer.
inline int64_t warp_tiles_of(const VerifyParams& p) {
  return warp_tiles_of(std::max(p.vocab, p.draft.vocab));
}

// Whether the best entry of a row may be needed, by Gumbel-max sampling or as the maximum.
inline bool needs_best(const SamplingParams& s, bool gumbel) {
  return gumbel || s.temperatures != nullptr || s.temperature == 0;
}

// The configuration of a launch, except for its grid.
struct GroupConfig {
  cudaLaunchAttribute cluster = {};
  cudaLaunchConfig_t config = {};

  GroupConfig(int group, bool clusters) {
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = sizeof(Shared);
    config.attrs = &cluster;
    if (!clusters) return;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(group);
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
    config.numAttrs = 1;
  }
  GroupConfig(const GroupConfig&) = delete;
};

template <class Kernel>
cudaError_t ask_device(Kernel* kernel, int index, Device* out) {
  *out = {};
  int major = 0;
  cudaError_t status =
      cudaDeviceGetAttribute(&out->processors, cudaDevAttrMultiProcessorCount, index);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (status != cudaSuccess) return status;
  // The virtual architecture that the code for this device was compiled from counts too.
  cudaFuncAttributes attributes = {};
  status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (status != cudaSuccess) return status;
  out->clusters = major >= 9 && attributes.ptxVersion >= 90;
  const int room = kBlocksPerProcessor * out->processors;
  out->groups[0] = room;
  for (int i = 1; i < kGroupSizes && out->clusters; ++i) {
    GroupConfig launch(1 << i, true);
    launch.config.gridDim = dim3(1u << i);
    status = cudaOccupancyMaxActiveClusters(&out->groups[i], kernel, &launch.config);
    if (status != cudaSuccess) return status;
    out->groups[i] = std::min(out->groups[i], room >> i);
  }
  return cudaSuccess;
}

// Asks once for each device and kernel, because the driver takes long to answer.
template <class Kernel>
cudaError_t current_device(Kernel* kernel, Device* out) {
  constexpr int kKnown = 64;
  static Device known[kKnown];
  static std::atomic<bool> asked[kKnown];
  static std::mutex asking;
  int index = 0;
  cudaError_t status = cudaGetDevice(&index);
  if (status != cudaSuccess) return status;
  if (index >= kKnown) return ask_device(kernel, index, out);
  if (!asked[index]) {
    const std::lock_guard<std::mutex> lock(asking);
    if (!asked[index]) {
      status = ask_device(kernel, index, &known[index]);
      if (status != cudaSuccess) return status;
      asked[index] = true;
    }
  }
  *out = known[index];
  return cudaSuccess;
}

// Row-parallel reads all rows of a sequence, while row-lazy stops after half of them or so but has
// at most eight blocks for a sequence. So row-parallel pays if row-lazy would leave half of the
// device idle or more: with up to 8 sequences on 132 multiprocessors, where reading rows in vain
// costs a few microseconds. With one row for each sequence nothing is read in vain.
inline bool row_parallel_pays(const Device& device, int64_t sequences, int64_t rows) {
  const int64_t busy = sequences * kMaxGroupSize;
  return rows == 1 ? busy < kBlocksPerProcessor * device.processors : busy * 2 <= device.processors;
}

// Plans for `sequences` with `rows` of `warp_tiles` each. reads_again: the last group reads rows a
// second time, so that a larger group pays in the row-parallel schedule too.
inline CudaPlan make_plan(const CudaRequest& request, const Device& device, int64_t sequences,
                          int64_t rows, int64_t warp_tiles, bool reads_again) {
  // Blocks that one pass over a row keeps busy.
  const int64_t whole_row = (warp_tiles + kWarps - 1) / kWarps;
  CudaPlan plan = {};
  if (sequences * rows == 0) return plan;
  const auto largest_group = [&](int64_t sequences_at_once) {
    int i = 0;
    while (i + 1 < kGroupSizes && 2 << i <= whole_row &&
           device.groups[i + 1] >= std::max<int64_t>(1, sequences_at_once)) {
      ++i;
    }
    return i;
  };
  // A ticket counts the groups of a sequence in 16 bits.
  const int64_t most_splits = kMostArrivals / rows;
  plan.parallel = most_splits > 0 && (request.schedule == Schedule::kParallel ||
                                      (request.schedule == Schedule::kAuto && whole_row > 1 &&
                                       row_parallel_pays(device, sequences, rows)));
  int size = plan.parallel ? reads_again ? largest_group(1) : 0 : largest_group(sequences);
  if (request.group_size > 0) {
    for (size = 0; 2 << size <= request.group_size && device.groups[size + 1] > 0;) ++size;
  }
  plan.group_size = 1 << size;
  const int64_t room = std::max(1, device.groups[size]);
  if (!plan.parallel) {
    plan.splits = 1;
    plan.groups = std::min(sequences, room);
    return plan;
  }
  const int64_t share = room / (sequences * rows), useful = whole_row / plan.group_size;
  plan.splits = static_cast<int32_t>(std::max<int64_t>(1, std::min({share, useful, most_splits})));
  plan.groups = sequences * rows * plan.splits;
  return plan;
}

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection.
inline uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// The id of a launch has 48 bits that memory is unlikely to hold by chance: the sequence of ids
// starts at random, and the upper byte is neither 0x00 nor 0xff, as in small integers.
inline uint64_t next_launch_id() {
  static std::atomic<uint64_t> count{uint64_t{std::random_device()()} << 32 ^
                                     std::random_device()()};
  for (;;) {
    const uint64_t id = mixed(count.fetch_add(1)) >> 16;
    if (id >> 40 != 0 && id >> 40 != 0xff) return id;
  }
}

template <class Job>
cudaError_t launch_groups(void (*kernel)(Job), const Job& job, const CudaPlan& plan,
                          const Device& device, void* stream) {
  GroupConfig launch(plan.group_size, device.clusters);
  launch.config.gridDim = dim3(static_cast<unsigned>(plan.groups * plan.group_size));
  launch.config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&launch.config, kernel, job);
}

}  // namespace specdec::cuda
