#pragma once
// Enough of CUDA's runtime for g++ to compile csrc/cuda/*.cu and for a CPU to run them: a launch
// runs every thread of the grid, one after the other. What needs threads at the same time
// (__syncthreads, shuffles, atomics between blocks) is not here.
#include <cstddef>
#include <cstdint>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 gridDim, blockDim, blockIdx, threadIdx;

// With CUDA's alignment, so that the undefined-behaviour sanitizer reports what would fault there;
// copied word by word, so that a report is all that happens here.
struct alignas(16) uint4 {
  unsigned x = 0, y = 0, z = 0, w = 0;
  uint4() = default;
  uint4(const uint4& o) : x(o.x), y(o.y), z(o.z), w(o.w) {}
  uint4& operator=(const uint4& o) {
    x = o.x, y = o.y, z = o.z, w = o.w;
    return *this;
  }
};
struct alignas(8) uint2 {
  unsigned x = 0, y = 0;
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace simt {
inline bool reverse = false;  // the last thread of the last block first
inline int64_t launches = 0;
}  // namespace simt

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  const dim3 grid = config->gridDim, block = config->blockDim;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  constexpr size_t kParameterBytes = (sizeof(Params) + ... + 0);
  if (blocks == 0 || threads == 0 || threads > 1024 || grid.x >= 1u << 31 || grid.y > 65535 ||
      grid.z > 65535 || kParameterBytes > 32764) {
    return cudaErrorInvalidConfiguration;
  }
  ++simt::launches;
  gridDim = grid;
  blockDim = block;
  for (uint64_t n = 0; n < blocks * threads; ++n) {
    const uint64_t i = simt::reverse ? blocks * threads - 1 - n : n;
    const unsigned t = static_cast<unsigned>(i % threads);
    const uint64_t b = i / threads;
    threadIdx = dim3(t % block.x, t / block.x % block.y, t / block.x / block.y);
    blockIdx = dim3(static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                    static_cast<unsigned>(b / grid.x / grid.y));
    kernel(args...);
  }
  return cudaSuccess;
}
