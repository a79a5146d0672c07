#pragma once
// Host side of a launch: what the device runs at once, attributes, the id of the launch.
#include <cuda_runtime.h>

#include <atomic>
#include <mutex>
#include <random>

#include "cuda/plan.cuh"
#include "cuda/ticket.cuh"

namespace specdec::cuda {

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

// The multiprocessors of the current device, asked once of each.
inline cudaError_t multiprocessors(int* processors) {
  constexpr int kKnown = 64;
  static std::atomic<int> known[kKnown] = {};
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device < kKnown && known[device] != 0) {
    *processors = known[device];
    return cudaSuccess;
  }
  status = cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess && device < kKnown) known[device] = *processors;
  return status;
}

// Into how many splits each of `units` rows is divided: so that a multiprocessor gets eight blocks,
// twice as many as it runs at once, but no split has less than a warp tile for each warp.
inline int splits_of(int processors, int64_t units, int64_t warp_tiles) {
  const int64_t wanted = int64_t{processors} * 8 / std::max<int64_t>(units, 1);
  const int64_t useful = (warp_tiles + kWarps - 1) / kWarps;
  return static_cast<int>(std::clamp<int64_t>(std::min(wanted, useful), 1, kMostArrivals));
}

template <class Job>
cudaError_t launch_blocks(void (*kernel)(Job), const Job& job, int64_t blocks, size_t shared_bytes,
                          void* stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, job);
}

// A kernel of block groups: what the devices run of it at once, and its launch.
template <class Job>
class GroupKernel {
 public:
  constexpr GroupKernel(void (*kernel)(Job), int blocks_per_processor)
      : kernel_(kernel), blocks_per_processor_(blocks_per_processor) {}

  // What the current device runs at once. Each is asked once, because the driver takes long to
  // answer.
  cudaError_t device(Device* out) {
    int index = 0;
    cudaError_t status = cudaGetDevice(&index);
    if (status != cudaSuccess) return status;
    if (index >= kKnown) return ask(index, out);
    if (!asked_[index]) {
      const std::lock_guard<std::mutex> lock(asking_);
      if (!asked_[index]) {
        status = ask(index, &known_[index]);
        if (status != cudaSuccess) return status;
        asked_[index] = true;
      }
    }
    *out = known_[index];
    return cudaSuccess;
  }

  cudaError_t launch(const Job& job, void* stream) {
    Device on;
    const cudaError_t status = device(&on);
    if (status != cudaSuccess) return status;
    const CudaPlan& plan = job.plan;
    GroupConfig launch(plan.group_size, on.clusters);
    launch.config.gridDim = dim3(static_cast<unsigned>(plan.groups * plan.group_size));
    launch.config.stream = static_cast<cudaStream_t>(stream);
    return cudaLaunchKernelEx(&launch.config, kernel_, job);
  }

 private:
  cudaError_t ask(int index, Device* out) const {
    *out = {};
    int major = 0;
    cudaError_t status =
        cudaDeviceGetAttribute(&out->processors, cudaDevAttrMultiProcessorCount, index);
    if (status != cudaSuccess) return status;
    status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (status != cudaSuccess) return status;
    // The virtual architecture that the code for this device was compiled from counts too.
    cudaFuncAttributes attributes = {};
    status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel_));
    if (status != cudaSuccess) return status;
    out->clusters = major >= 9 && attributes.ptxVersion >= 90;
    // A device may have less shared memory than these blocks need.
    int fit = 0;
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel_, kThreads, sizeof(Shared));
    if (status != cudaSuccess) return status;
    out->blocks = std::min(fit, blocks_per_processor_) * out->processors;
    out->groups[1] = out->blocks;
    const bool pending = cudaPeekAtLastError() != cudaSuccess;  // of other work, which must be told
    for (int size = 2; size <= kMaxGroupSize && out->clusters; ++size) {
      GroupConfig launch(size, true);
      launch.config.gridDim = dim3(static_cast<unsigned>(size));
      status = cudaOccupancyMaxActiveClusters(&fit, kernel_, &launch.config);
      // A device, or a partition of one, that is too small for the size may answer with an error.
      if (status != cudaSuccess && !pending) cudaGetLastError();
      out->groups[size] = status == cudaSuccess ? std::min(fit, out->blocks / size) : 0;
    }
    return cudaSuccess;
  }

  static constexpr int kKnown = 64;
  void (*kernel_)(Job);
  int blocks_per_processor_;
  Device known_[kKnown] = {};
  std::atomic<bool> asked_[kKnown] = {};
  std::mutex asking_;
};

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

}  // namespace specdec::cuda
