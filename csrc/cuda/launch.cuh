#pragma once
// Host side of a launch: what the device is, how many teams of what size, the attributes.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <random>

#include "cuda/row.cuh"
#include "specdec/cuda.h"

namespace specdec {

constexpr int kMaxTeam = 8;
constexpr int kBlocksPerProcessor = 2;

struct Device {
  int processors;
  bool clusters;  // thread-block clusters, programmatic dependent launch
};

// The virtual architecture that the code for the current device was compiled from. Asked once a
// device, because it is the one answer that takes the driver long.
template <class Kernel>
cudaError_t compiled_for(Kernel* kernel, int device, int* version) {
  constexpr int kKnown = 64;
  static std::atomic<int> known[kKnown];
  if (device < kKnown && (*version = known[device]) != 0) return cudaSuccess;
  cudaFuncAttributes attributes = {};
  const cudaError_t status =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  *version = attributes.ptxVersion;
  if (device < kKnown) known[device] = attributes.ptxVersion;
  return status;
}

template <class Kernel>
cudaError_t current_device(Kernel* kernel, Device* out) {
  int index = 0, major = 0, version = 0;
  cudaError_t status = cudaGetDevice(&index);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&out->processors, cudaDevAttrMultiProcessorCount, index);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (status != cudaSuccess) return status;
  status = compiled_for(kernel, index, &version);
  out->clusters = major >= 9 && version >= 90;
  return status;
}

// `rows` of `spans` each for every one of `sequences`. wide: the walk of the last team reads rows
// again, so that a larger team pays in the row-parallel schedule too.
inline CudaPlan make_plan(const CudaRequest& request, const Device& device, int64_t sequences,
                          int64_t rows, int64_t spans, bool wide) {
  const int64_t room = int64_t{kBlocksPerProcessor} * device.processors;
  const int64_t whole_row =
      (spans + kWarps - 1) / kWarps;  // blocks that one step of a row keeps busy
  CudaPlan plan = {};
  if (sequences * rows == 0) return plan;
  const int most = device.clusters ? kMaxTeam : 1;
  const auto fitting = [&](int64_t blocks) {
    int team = 1;
    while (team < most && team * 2 <= blocks) team *= 2;
    return team;
  };
  plan.parallel = request.schedule == Schedule::kParallel ||
                  (request.schedule == Schedule::kAuto && whole_row > 1 && sequences * most < room);
  if (plan.parallel) {
    plan.team = wide ? fitting(whole_row) : 1;
  } else {
    plan.team = fitting(std::min(whole_row, room / sequences));
  }
  if (request.team > 0) plan.team = std::min(request.team, most);
  if (!plan.parallel) {
    plan.parts = 1;
    plan.teams = std::max<int64_t>(1, std::min(sequences, room / plan.team));
    return plan;
  }
  const int64_t share = std::max<int64_t>(1, room / (sequences * rows * plan.team));
  const int64_t useful = std::max<int64_t>(1, whole_row / plan.team);
  plan.parts = static_cast<int32_t>(std::min(share, useful));
  plan.teams = sequences * rows * plan.parts;
  return plan;
}

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection.
inline uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// 48 bits that memory does not hold by chance: they start anywhere, and their upper byte is none of
// a small integer's.
inline uint64_t next_launch() {
  static std::atomic<uint64_t> count{uint64_t{std::random_device()()} << 32 ^
                                     std::random_device()()};
  for (;;) {
    const uint64_t launch = mixed(count.fetch_add(1)) >> 16;
    if (launch >> 40 != 0 && launch >> 40 != 0xff) return launch;
  }
}

template <class Job>
cudaError_t launch_teams(void (*kernel)(Job), const Job& job, const CudaPlan& plan,
                         const Device& device, void* stream) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.teams * plan.team));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (device.clusters) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = static_cast<unsigned>(plan.team);
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    config.numAttrs = 2;
  }
  return cudaLaunchKernelEx(&config, kernel, job);
}

}  // namespace specdec
