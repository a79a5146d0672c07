#pragma once
// The runtime functions of the host. Tests choose the properties of the emulated device.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>

#include "vector_types.h"

using cudaStream_t = void*;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorLaunchFailure = 719,
  cudaErrorInvalidClusterSize = 912,
};

enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrClusterLaunch = 120,
};

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 15,
};

enum cudaLaunchAttributeID {
  cudaLaunchAttributeIgnore = 0,
  cudaLaunchAttributeClusterDimension = 4,
};

union cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
};

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace simt {

inline int multiprocessors = 4;
inline int capability_major = 9, capability_minor = 0;
inline unsigned largest_cluster = 16;      // a partition of a device may have fewer blocks
inline int max_shared_per_block = 232448;  // for a function that opted in
inline int max_shared_per_multiprocessor = 233472;
inline int64_t launches = 0;
constexpr int kRuntimeVersion = 13000;  // CUDA 13.0
inline int driver_version = kRuntimeVersion;

constexpr int kMaxSharedByDefault = 49152;
constexpr int kSharedReservedPerBlock = 1024;
constexpr int kThreadsPerMultiprocessor = 2048, kBlocksPerMultiprocessor = 32;

struct FunctionLimits {
  int shared = kMaxSharedByDefault;
  bool large_cluster = false;
};
inline std::map<const void*, FunctionLimits> function_limits;

inline cudaError_t last_error = cudaSuccess;
inline std::string message;  // the reason why the last launch failed

inline cudaError_t report(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

}  // namespace simt

inline cudaError_t cudaPeekAtLastError() { return simt::last_error; }
inline cudaError_t cudaGetLastError() {
  const cudaError_t status = simt::last_error;
  simt::last_error = cudaSuccess;
  return status;
}

inline const char* cudaGetErrorString(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorInvalidClusterSize:
      return "cluster misconfiguration";
    default:
      return simt::message.c_str();
  }
}

inline const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    default:
      return "another error";
  }
}

inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = simt::driver_version;
  return cudaSuccess;
}

inline cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = simt::kRuntimeVersion;
  return cudaSuccess;
}

// Each compute capability is another device, because hosts keep the attributes of a device.
inline cudaError_t cudaGetDevice(int* device) {
  if (simt::driver_version < simt::kRuntimeVersion) {
    return simt::report(cudaErrorInsufficientDriver);
  }
  *device = simt::capability_major;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = simt::kMaxSharedByDefault;
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = 32;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = simt::multiprocessors;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = simt::capability_major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = simt::capability_minor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = simt::max_shared_per_multiprocessor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = simt::max_shared_per_block;
      return cudaSuccess;
    case cudaDevAttrClusterLaunch:
      *value = simt::capability_major >= 9;
      return cudaSuccess;
  }
  return simt::report(cudaErrorInvalidValue);
}

template <class F>
cudaError_t cudaFuncSetAttribute(F* function, cudaFuncAttribute attribute, int value) {
  simt::FunctionLimits& limits = simt::function_limits[reinterpret_cast<const void*>(function)];
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed)
    limits.large_cluster = value != 0;
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value < 0 || value > simt::max_shared_per_block) return simt::report(cudaErrorInvalidValue);
    limits.shared = value;
  }
  return cudaSuccess;
}

struct cudaFuncAttributes {
  int ptxVersion, binaryVersion;
};

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  const int version = simt::capability_major * 10 + simt::capability_minor;
  *attributes = {version, version};
  return cudaSuccess;
}

template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F*, int threads,
                                                          size_t shared) {
  if (threads <= 0 || threads > 1024) return simt::report(cudaErrorInvalidValue);
  const size_t each = shared + simt::kSharedReservedPerBlock;
  *blocks = std::min({simt::kBlocksPerMultiprocessor,
                      simt::kThreadsPerMultiprocessor / ((threads + 31) / 32 * 32),
                      static_cast<int>(simt::max_shared_per_multiprocessor / each)});
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  std::memset(p, value, bytes);
  return cudaSuccess;
}
