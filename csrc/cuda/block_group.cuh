#pragma once
// A block group: the thread blocks that work on one row or sequence together. On sm_90 and later it
// is a thread-block cluster, before that a single block; the code that includes this file does not
// depend on which.
#include <cooperative_groups.h>
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
constexpr int kBins = 2048;        // of one pass of a selection
constexpr int kCandidates = 2048;  // keys that a selection keeps
// Blocks that run at once on a multiprocessor, for kernels whose loops do with 64 registers. With
// as few, code for other devices than sm_90 spills. The launcher asks the device how many fit.
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

struct Shared : BlockShared {
  unsigned long long bins[kBins];
  uint32_t candidates[kCandidates];  // ordered keys
  uint32_t num_candidates;
  // The state of the sequence that the kernel works on. It is kept here because the loops over
  // entries need the registers.
  alignas(16) unsigned char task[1184];
};

template <class T = Shared>
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

// Access to the shared memory of other blocks needs sm_90.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
struct Cluster {
  __device__ unsigned rank() const { return 0; }
  __device__ unsigned size() const { return 1; }
  __device__ void sync() const { __syncthreads(); }
  template <class T>
  __device__ T* remote(T* mine, unsigned) const {
    return mine;
  }
};
#else
// Not inlined: it takes 60 instructions, and a kernel has several of them.
inline SPECDEC_NOINLINE __device__ void sync_cluster() {
  cooperative_groups::this_cluster().sync();
}

struct Cluster {
  // Read at every use, like the thread's id.
  __device__ unsigned rank() const {
#ifdef __CUDA_ARCH__
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return cooperative_groups::this_cluster().block_rank();
#endif
  }
  __device__ unsigned size() const {
#ifdef __CUDA_ARCH__
    unsigned size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
#else
    return cooperative_groups::this_cluster().num_blocks();
#endif
  }
  __device__ void sync() const { sync_cluster(); }
  template <class T>
  __device__ T* remote(T* mine, unsigned rank) const {
    return cooperative_groups::this_cluster().map_shared_rank(mine, rank);
  }
};
#endif

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
inline __device__ uint32_t warp_max(uint32_t value) {
#ifdef __CUDA_ARCH__
  return __reduce_max_sync(kAllLanes, value);
#else
  return fold_lanes(value, Larger());
#endif
}

// Every thread of every block of a group holds one; its fields are the same in all of
// them. All blocks also compute the same results of reductions, and so make the same decisions:
// no block waits for the decision of another.
struct BlockGroup {
  BlockShared* shared;
  unsigned exchange_buffer;  // which buffer of Shared::exchange the next reduction writes

  static __device__ BlockGroup mine() { return {shared_memory(), 0}; }

  __device__ unsigned rank() const { return Cluster().rank(); }
  __device__ unsigned size() const { return Cluster().size(); }

  // The number of this group in the grid.
  __device__ unsigned index() const {
#ifdef __CUDA_ARCH__
    unsigned block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block / size();
#else
    return blockIdx.x / size();
#endif
  }

  __device__ void sync() const {
    if (size() == 1) {
      __syncthreads();
    } else {
      Cluster().sync();
    }
  }

  template <class T>
  __device__ T& task() const {
    static_assert(sizeof(T) <= sizeof Shared::task, "fits");
    return *reinterpret_cast<T*>(shared_memory()->task);
  }

  // The same place in the shared memory of another block.
  template <class T>
  __device__ T* remote(T* mine, unsigned other) const {
    return Cluster().remote(mine, other);
  }

  // The first warp tile of this warp and the step to its next one, if `splits` groups share a row.
  __device__ int64_t first_warp_tile(int split) const {
    return (int64_t{split} * size() + rank()) * kWarps + warp_id();
  }
  __device__ int64_t warp_tile_step(int splits) const { return int64_t{splits} * size() * kWarps; }

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
    uint64_t* const buffer = shared->exchange[exchange_buffer];
    exchange_buffer ^= 1;
    if (lane_id() == 0) buffer[warp_id()] = bits_as<uint64_t>(value);
    __syncthreads();
    return buffer;
  }
  template <class T>
  static __device__ T read(const uint64_t* buffer, int warp) {
    return bits_as<T>(buffer[warp]);
  }
};

}  // namespace specdec::cuda
