#pragma once
// One thread block: its threads, its shared memory, and folds over it.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "specdec/host_device.h"

#ifdef __CUDACC__
extern __shared__ __align__(16) unsigned char specdec_dynamic_shared[];
#endif

namespace specdec::cuda {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
constexpr unsigned kAllLanes = 0xffffffffu;
// Blocks that run at once on a multiprocessor, for kernels whose loops do with few registers: with
// 64 a thread four fit on sm_90; for other devices that would spill, and three take up to 80.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int kBlocksWithFewRegisters = 3;
#else
constexpr int kBlocksWithFewRegisters = 4;
#endif

// What the threads of a block exchange. The shared memory of every kernel begins with it.
struct BlockShared {
  uint64_t exchange[2][kWarps];
  int64_t broadcast[2];
};

template <class T>
inline __device__ T* shared_memory() {
#ifdef __CUDACC__
  return reinterpret_cast<T*>(specdec_dynamic_shared);
#else
  return reinterpret_cast<T*>(simt::shared_memory());
#endif
}

// Read at every use: otherwise what is derived from it would occupy registers throughout.
inline __device__ int thread_id() {
#ifdef __CUDA_ARCH__
  int id;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(id));
  return id;
#else
  return static_cast<int>(threadIdx.x);
#endif
}
inline __device__ int lane_id() { return thread_id() % kLanes; }
inline __device__ int warp_id() { return thread_id() / kLanes; }

template <class To, class From>
inline __device__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// What other threads may be changing.
template <class T>
inline __device__ T peek(const T* word) {
#ifdef __CUDACC__
  return *static_cast<const volatile T*>(word);
#else
  return simt::relaxed_load(word);
#endif
}

struct Add {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

// Folds one value of each lane; in every lane.
template <class T, class Op>
inline __device__ T fold_lanes(T value, Op op) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value = op(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// The largest of a warp; in every lane.
inline __device__ uint32_t warp_max(uint32_t value) { return __reduce_max_sync(kAllLanes, value); }

// Every thread of a block holds one. All of them call a fold, and all get its result.
class ThreadBlock {
 public:
  __device__ explicit ThreadBlock(BlockShared& shared) : shared_(shared) {}

  // Two words for what one thread tells the others.
  __device__ int64_t* broadcast() const { return shared_.broadcast; }

  // Folds one value of each warp, in the order of the warps. Calls alternate between two buffers,
  // so that each needs one barrier only.
  template <class T, class Op>
  __device__ T fold_warps(T value, Op op) {
    uint64_t* const buffer = exchange(value);
    T all = read<T>(buffer, 0);
    for (int w = 1; w < kWarps; ++w) all = op(all, read<T>(buffer, w));
    return all;
  }

  // Sum over the block, always taken in the same order.
  template <class T>
  __device__ T sum(T value) {
    return fold_warps(fold_lanes(value, Add()), Add());
  }

  // Sum over the threads of the block before this one; the block's sum in `all`.
  __device__ int64_t sum_before(int64_t value, int64_t& all) {
    int64_t upto = value;
    for (int step = 1; step < kLanes; step *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, upto, step);
      if (lane_id() >= step) upto += other;
    }
    uint64_t* const buffer = exchange(__shfl_sync(kAllLanes, upto, kLanes - 1));
    int64_t before = 0;
    all = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int64_t part = read<int64_t>(buffer, w);
      if (w < warp_id()) before += part;
      all += part;
    }
    return before + upto - value;
  }

  // The largest key of the block.
  __device__ uint32_t max_key(uint32_t key) {
    uint64_t* const buffer = exchange(uint64_t{warp_max(key)});
    return warp_max(static_cast<uint32_t>(buffer[lane_id() % kWarps]));
  }

  // The smallest and the largest unsigned number of the block.
  __device__ uint64_t min(uint64_t value) { return ~max(~value); }
  __device__ uint64_t max(uint64_t value) {
    return fold_warps(fold_lanes(value, Larger()), Larger());
  }

 private:
  template <class T>
  __device__ uint64_t* exchange(T value) {
    static_assert(sizeof(T) == 8, "one word");
    uint64_t* const buffer = shared_.exchange[next_];
    next_ ^= 1;
    if (lane_id() == 0) buffer[warp_id()] = bits_as<uint64_t>(value);
    __syncthreads();
    return buffer;
  }
  template <class T>
  static __device__ T read(const uint64_t* buffer, int warp) {
    return bits_as<T>(buffer[warp]);
  }

  BlockShared& shared_;
  unsigned next_ = 0;  // which buffer of BlockShared::exchange the next fold writes
};

}  // namespace specdec::cuda
