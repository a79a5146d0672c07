#pragma once
// The runtime functions of the host. Tests choose the properties of the emulated device.
#include <cstddef>
#include <cstdint>
#include <string>

#include "schedule.h"

using cudaStream_t = void*;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorLaunchFailure = 719,
};

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace simt {

inline int multiprocessors = 4;
inline int64_t launches = 0;
constexpr int kRuntimeVersion = 13000;  // CUDA 13.0
inline int driver_version = kRuntimeVersion;
constexpr size_t kMostShared = 49152;  // bytes, which a kernel gets without asking for more
// A number too large for the launcher to keep the attributes of the device, which tests change.
constexpr int kDevice = 100;

inline cudaError_t last_error = cudaSuccess;

inline cudaError_t report(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

}  // namespace simt

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
    default:
      return simt::scheduler.failure.c_str();
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

inline cudaError_t cudaGetDevice(int* device) {
  if (simt::driver_version < simt::kRuntimeVersion) {
    return simt::report(cudaErrorInsufficientDriver);
  }
  *device = simt::kDevice;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = simt::multiprocessors;
  return cudaSuccess;
}
