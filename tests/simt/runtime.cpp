// Kernels that use every CUDA feature of the emulator, for test_simt_runtime.py. This is plain
// CUDA, which nvcc -x cu compiles as well.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

namespace cg = cooperative_groups;
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

__device__ int warp_sum(int x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kFull, x, offset);
  return x;
}

// The sum over the block, in every thread. Needs one int of shared memory for each warp.
template <bool Barrier>
__device__ int block_sum(int x, int* partial) {
  const unsigned warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) partial[warp] = x;
  if (Barrier) __syncthreads();
  int sum = 0;
  for (unsigned i = 0; i < warps; ++i) sum += partial[i];
  return sum;
}

template <bool Barrier>
__global__ void __launch_bounds__(1024) sum_kernel(const int* in, int* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = block_sum<Barrier>(in[i], shared<int>());
}

// Every block of a cluster writes the sum over the cluster.
template <bool LastSync>
__global__ void cluster_kernel(const int* in, int* out) {
  int* const partial = shared<int>();
  int* const mine = partial + blockDim.x / 32;
  const cg::cluster_group cluster = cg::this_cluster();
  const int sum = block_sum<true>(in[blockIdx.x * blockDim.x + threadIdx.x], partial);
  if (threadIdx.x == 0) *mine = sum;
  cluster.sync();
  int total = 0;
  for (unsigned i = 0; i < cluster.num_blocks(); ++i) total += *cluster.map_shared_rank(mine, i);
  if (threadIdx.x == 0) out[blockIdx.x] = total * 16 + cluster.block_rank();
  if (LastSync) cluster.sync();
}

// The number of blocks that have taken a ticket before. In two steps, two blocks may get the same.
template <bool OneStep>
__device__ unsigned take(unsigned* ticket) {
  if (OneStep) return atomicInc(ticket, gridDim.x - 1);
  const unsigned before = atomicAdd(ticket, 0u);
  atomicExch(ticket, before + 1 == gridDim.x ? 0u : before + 1);
  return before;
}

// The block that finishes last adds up the sums of all blocks.
template <bool OneStep>
__global__ void ticket_kernel(const int* in, int* sums, unsigned* ticket, int* out) {
  const int sum = block_sum<true>(in[blockIdx.x * blockDim.x + threadIdx.x], shared<int>());
  bool last = false;
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = sum;
    __threadfence();
    last = take<OneStep>(ticket) == gridDim.x - 1;
  }
  if (!__syncthreads_or(last)) return;
  __threadfence();
  const int mine = threadIdx.x < gridDim.x ? __ldcg(&sums[threadIdx.x]) : 0;
  const int total = block_sum<true>(mine, shared<int>() + 32);
  if (threadIdx.x == 0) *out = total;
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
  kMapReturned,
  kWriteReturned,
  kHalfOfCluster,
};

__global__ void fault_kernel(int fault, unsigned* flag) {
  unsigned* const s = shared<unsigned>();
  const unsigned t = threadIdx.x, rank = cg::this_cluster().block_rank();
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
  if (fault == kMapReturned && rank == 1) *cg::this_cluster().map_shared_rank(s, 0) = t;
  if (fault == kHalfOfCluster && rank == 1) cg::this_cluster().sync();
  if (fault == kWriteReturned) {
    unsigned* const other = cg::this_cluster().map_shared_rank(s, 1 - rank);
    cg::this_cluster().sync();
    *other = t;
  }
}

template <class... KernelParams, class... Args>
int launch(void (*kernel)(KernelParams...), unsigned grid, unsigned block, unsigned cluster,
           size_t shared_bytes, Args... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace

extern "C" {

int run_sum(const int* in, int* out, unsigned grid, unsigned block, bool barrier) {
  return launch(barrier ? sum_kernel<true> : sum_kernel<false>, grid, block, 1, block / 8, in, out);
}
int run_cluster(const int* in, int* out, unsigned grid, unsigned block, unsigned cluster,
                bool last_sync) {
  return launch(last_sync ? cluster_kernel<true> : cluster_kernel<false>, grid, block, cluster, 256,
                in, out);
}
int run_ticket(const int* in, int* sums, unsigned* ticket, int* out, unsigned grid, bool one_step) {
  return launch(one_step ? ticket_kernel<true> : ticket_kernel<false>, grid, 128, 1, 256, in, sums,
                ticket, out);
}
int run_poison(unsigned* out, unsigned grid, unsigned cluster) {
  return launch(poison_kernel, grid, 64, cluster, 256, out);
}
int run_neighbour(int* out, bool barrier) {
  return launch(barrier ? neighbour_kernel<true> : neighbour_kernel<false>, 1, 32, 1, 128, out);
}
int run_fault(int fault, unsigned threads) {
  unsigned flag = 0;
  return launch(fault_kernel, 2, threads, 2, 64, fault, &flag);
}
int last_error() { return cudaGetLastError(); }
const char* error_string(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

#ifndef __CUDACC__
void set_order(bool reverse, uint64_t seed, unsigned clusters) {
  simt::reverse = reverse;
  simt::shuffle_seed = seed;
  simt::clusters_at_once = clusters;
}
#endif

}  // extern "C"
