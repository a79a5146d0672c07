// Kernels that use every CUDA feature of the emulator, for test_simt_runtime.py. This is plain
// CUDA, which nvcc -x cu compiles as well.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr unsigned kFull = 0xFFFFFFFF;

#ifdef __CUDACC__
extern __shared__ __align__(128) unsigned char shared_bytes[];
template <class T>
__device__ T* shared() {
  return reinterpret_cast<T*>(shared_bytes);
}
#else
template <class T>
T* shared() {
  return reinterpret_cast<T*>(simt::shared_memory());
}
#endif

// Every thread writes the sum over the block.
template <bool Barrier>
__global__ void sum_kernel(const int* in, int* out) {
  const unsigned t = threadIdx.x;
  int* const partial = shared<int>();
  int x = in[t], sum = 0;
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kFull, x, offset);
  if (t % 32 == 0) partial[t / 32] = x;
  if (Barrier) __syncthreads();
  for (unsigned i = 0; i < blockDim.x / 32; ++i) sum += partial[i];
  out[t] = sum;
}

// Counts its blocks, which have one thread. In two steps, two of them may count as one.
template <bool OneStep>
__global__ void count_kernel(unsigned* count) {
  OneStep ? atomicAdd(count, 1u) : atomicExch(count, atomicAdd(count, 0u) + 1);
}

// Writes the initial contents of a block's shared memory, and then fills it.
__global__ void poison_kernel(unsigned* out) {
  unsigned* const s = shared<unsigned>();
  out[blockIdx.x * blockDim.x + threadIdx.x] = s[threadIdx.x];
  s[threadIdx.x] = threadIdx.x;
}

// Reads the neighbour's entry, for which the warp has to synchronize.
template <bool Barrier>
__global__ void neighbour_kernel(int* out) {
  int* const s = shared<int>();
  s[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (Barrier) __syncwarp();
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}

enum Fault : int {
  kNone,
  kDivergentBarrier,
  kReturnedBeforeBarrier,
  kMixedBarriers,
  kBarrierAgainstWarp,
  kShuffleWithoutLane,
  kShuffleReadsReturned,
  kMixedCollectives,
  kMaskWithoutCaller,
  kOverflow,
  kUnderflow,
  kSpin,
};

__global__ void fault_kernel(int fault, unsigned* flag) {
  unsigned* const s = shared<unsigned>();
  const unsigned t = threadIdx.x;
  if (fault == kDivergentBarrier && t < 40) __syncthreads();
  if (fault == kDivergentBarrier && t >= 40) __shfl_sync(kFull, t, 0);
  if (fault == kReturnedBeforeBarrier && t != 7) __syncthreads();
  if (fault == kMixedBarriers) t == 7 ? __syncthreads() : void(__syncthreads_or(1));
  if (fault == kBarrierAgainstWarp) t == 7 || t > 31 ? __syncthreads() : __syncwarp();
  if (fault == kShuffleWithoutLane && t != 7) __shfl_sync(0xFF, t, 0);
  if (fault == kShuffleReadsReturned && t != 7) __shfl_xor_sync(kFull, t, 1);
  if (fault == kMixedCollectives && t < 32) {
    t == 7 ? void(__any_sync(kFull, 1)) : void(__ballot_sync(kFull, 1));
  }
  if (fault == kMaskWithoutCaller) __syncwarp(0x7F);
  if (fault == kOverflow) s[16 + t / 32] = t;
  if (fault == kUnderflow && t == 0) s[-1] = t;
  if (fault == kSpin && t == 0) {
    while (atomicAdd(flag, 0u) == 0) {
    }
  }
}

template <class... KernelParams, class... Args>
int launch(void (*kernel)(KernelParams...), unsigned grid, unsigned block, size_t shared_bytes,
           Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace

extern "C" {

int run_sum(const int* in, int* out, bool barrier) {
  return launch(barrier ? sum_kernel<true> : sum_kernel<false>, 1, 256, 32, in, out);
}
int run_count(unsigned* count, unsigned grid, bool one_step) {
  return launch(one_step ? count_kernel<true> : count_kernel<false>, grid, 1, 0, count);
}
int run_poison(unsigned* out, unsigned grid) { return launch(poison_kernel, grid, 64, 256, out); }
int run_neighbour(int* out, bool barrier) {
  return launch(barrier ? neighbour_kernel<true> : neighbour_kernel<false>, 1, 32, 128, out);
}
int run_fault(int fault, unsigned threads) {
  unsigned flag = 0;
  return launch(fault_kernel, 2, threads, 64, fault, &flag);
}
int last_error() { return cudaGetLastError(); }
const char* error_string(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

#ifndef __CUDACC__
void set_order(bool reverse, uint64_t seed, unsigned blocks) {
  simt::reverse = reverse;
  simt::shuffle_seed = seed;
  simt::blocks_at_once = blocks;
}
#endif

}  // extern "C"
