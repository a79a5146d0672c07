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

__global__ void scan_kernel(const int* in, int* out) {
  int* const partial = shared<int>();
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int x = in[threadIdx.x];
  for (unsigned d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(kFull, x, d);
    if (lane >= d) x += below;
  }
  if (lane == 31) partial[warp] = x;
  __syncthreads();
  for (unsigned i = 0; i < warp; ++i) x += partial[i];
  out[threadIdx.x] = x;
}

// Writes the positive entries in their order, and their number to count.
__global__ void compact_kernel(const int* in, int* out, int* count) {
  int* const partial = shared<int>();
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int x = in[threadIdx.x];
  const unsigned kept = __ballot_sync(kFull, x > 0);
  if (lane == 0) partial[warp] = __popc(kept);
  const int total = __syncthreads_count(x > 0);
  int at = __popc(kept & ((1u << lane) - 1));
  for (unsigned i = 0; i < warp; ++i) at += partial[i];
  if (x > 0) out[at] = x;
  if (threadIdx.x == 0) *count = total;
}

__global__ void histogram_kernel(const int* in, int n, unsigned* out, int bins) {
  unsigned* const counts = shared<unsigned>();
  for (int i = threadIdx.x; i < bins; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    atomicAdd(&counts[in[i]], 1u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < bins; i += blockDim.x) atomicAdd(&out[i], counts[i]);
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

__global__ void grid_kernel(const int* in, int* sums, int* out) {
  const int sum = block_sum<true>(in[blockIdx.x * blockDim.x + threadIdx.x], shared<int>());
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
  cg::this_grid().sync();
  int total = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) total += sums[i];
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}

// Writes one row of 32 results for each warp-wide operation.
__global__ void lanes_kernel(const unsigned* in, unsigned long long* out) {
  const unsigned lane = threadIdx.x, x = in[lane];
  const unsigned half = lane < 16 ? 0xFFFFu : 0xFFFF0000u;
  unsigned long long* row = out + lane;
  const auto put = [&](unsigned long long value) {
    *row = value;
    row += 32;
  };
  put(__shfl_sync(kFull, x, 5));
  put(__shfl_sync(kFull, x, 35 - static_cast<int>(lane)));
  put(__shfl_sync(kFull, x, 1, 8));
  put(__shfl_up_sync(kFull, x, 3));
  put(__shfl_down_sync(kFull, x, 7, 16));
  put(__shfl_xor_sync(kFull, x, 9));
  put(static_cast<unsigned long long>(__shfl_xor_sync(kFull, x * 0.5, 1)));
  put(static_cast<unsigned long long>(__shfl_xor_sync(kFull, x * 0.25f, 1)));
  put(__shfl_xor_sync(kFull, x * 0x100000001ull, 1));
  put(static_cast<unsigned long long>(__shfl_xor_sync(kFull, static_cast<long long>(x), 1)));
  put(__ballot_sync(half, x & 1));
  put(__any_sync(half, x == in[0]));
  put(__all_sync(half, lane < 16));
  put(__reduce_add_sync(half, x));
  put(__reduce_min_sync(half, x));
  put(__reduce_max_sync(half, x));
  if (lane % 2) {
    put(__ballot_sync(0xAAAAAAAAu, lane > 7));
  } else {
    put(__ballot_sync(0x55555555u, lane > 7));
  }
  __syncwarp();
  put(__syncthreads_and(lane < 32) * 2 + __syncthreads_and(lane < 31));
}

__global__ void scalars_kernel(const uint4* in, uint4* out) {
  const uint4 x = in[threadIdx.x];
  uint4* row = out + threadIdx.x * 4;
  const unsigned long long a = uint64_t{x.y} << 32 | x.x, b = uint64_t{x.w} << 32 | x.z;
  const unsigned long long high = __umul64hi(a, b);
  row[0] = make_uint4(__popc(x.x), __popcll(a), __ffs(x.x), __clz(x.x));
  row[1] = make_uint4(__clzll(a), __umulhi(x.x, x.y), static_cast<unsigned>(high), high >> 32);
  const float p = __uint_as_float(x.x & 0x3FFFFFFF), q = __uint_as_float(x.y & 0x3FFFFFFF);
  row[2] = make_uint4(__float_as_uint(__fmul_rn(p, q)), __float_as_uint(__fadd_rn(p, q)),
                      __float_as_uint(__fsub_rn(p, q)), __float_as_uint(__fmaf_rn(p, q, p)));
  const double d = __ddiv_rn(p, __dadd_rn(q, 1));
  const unsigned long long bits = __double_as_longlong(__dmul_rn(d, d));
  row[3] = make_uint4(static_cast<unsigned>(bits), static_cast<unsigned>(bits >> 32),
                      __float_as_uint(exp2f(0 - p)), __float_as_uint(__fdiv_rn(q, 3)));
}

__constant__ const int kFactors[4] = {1, 3, 5, 7};

struct Totals {
  int sum, least, most;
  unsigned bits, ticket;
  unsigned long long swaps, greatest;
  double real;
};

__device__ __noinline__ void multiply(unsigned long long* address, unsigned long long factor) {
  unsigned long long seen = *address, was;
  do {
    was = seen;
    seen = atomicCAS(address, was, was * factor);
  } while (seen != was);
}

__global__ void atomics_kernel(const int* __restrict__ in, Totals* t) {
  const int x = __ldcs(&in[blockIdx.x * blockDim.x + threadIdx.x]);
  atomicAdd(&t->sum, x);
  atomicMin(&t->least, x);
  atomicMax(&t->most, x);
  atomicOr(&t->bits, 1u << (x & 31));
  atomicInc(&t->ticket, 99u);
  multiply(&t->swaps, kFactors[x & 3]);
  atomicMax(&t->greatest, static_cast<unsigned long long>(x & 0xFF) << 40);
  atomicAdd(&t->real, 0.5 * x);
}

// Writes the initial contents of a block's shared memory, and then fills it.
__global__ void poison_kernel(unsigned* out) {
  unsigned* const s = shared<unsigned>();
  __stcs(&out[blockIdx.x * blockDim.x + threadIdx.x], s[threadIdx.x]);
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
  if (fault == kMixedBarriers) t == 7 ? __syncthreads() : void(__syncthreads_count(1));
  if (fault == kBarrierAgainstWarp) t == 7 || t > 31 ? __syncthreads() : __syncwarp();
  if (fault == kShuffleWithoutLane && t != 7) __shfl_sync(0xFF, t, 0);
  if (fault == kShuffleReadsReturned && t != 7) __shfl_down_sync(kFull, t, 1);
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
           size_t shared_bytes, bool cooperative, Args... args) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = attributes;
  config.numAttrs = cooperative ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace

extern "C" {

int run_sum(const int* in, int* out, unsigned grid, unsigned block, bool barrier) {
  return launch(barrier ? sum_kernel<true> : sum_kernel<false>, grid, block, 1, block / 8, false,
                in, out);
}
int run_scan(const int* in, int* out, unsigned block) {
  return launch(scan_kernel, 1, block, 1, 128, false, in, out);
}
int run_compact(const int* in, int* out, unsigned block, int* count) {
  return launch(compact_kernel, 1, block, 1, 128, false, in, out, count);
}
int run_histogram(const int* in, int n, unsigned* out, int bins) {
  return launch(histogram_kernel, 3, 256, 1, bins * sizeof(unsigned), false, in, n, out, bins);
}
int run_cluster(const int* in, int* out, unsigned grid, unsigned block, unsigned cluster,
                bool last_sync) {
  return launch(last_sync ? cluster_kernel<true> : cluster_kernel<false>, grid, block, cluster, 256,
                false, in, out);
}
int run_ticket(const int* in, int* sums, unsigned* ticket, int* out, unsigned grid, bool one_step) {
  return launch(one_step ? ticket_kernel<true> : ticket_kernel<false>, grid, 128, 1, 256, false, in,
                sums, ticket, out);
}
int run_grid(const int* in, int* sums, int* out, unsigned grid) {
  return launch(grid_kernel, grid, 64, 1, 64, true, in, sums, out);
}
int run_lanes(const unsigned* in, unsigned long long* out) {
  return launch(lanes_kernel, 1, 32, 1, 0, false, in, out);
}
int run_scalars(const uint4* in, uint4* out) {
  return launch(scalars_kernel, 1, 256, 1, 0, false, in, out);
}
int run_atomics(const int* in, unsigned grid, void* totals) {
  return launch(atomics_kernel, grid, 64, 1, 0, false, in, static_cast<Totals*>(totals));
}
int run_poison(unsigned* out, unsigned grid, unsigned cluster) {
  return launch(poison_kernel, grid, 64, cluster, 256, false, out);
}
int run_neighbour(int* out, bool barrier) {
  return launch(barrier ? neighbour_kernel<true> : neighbour_kernel<false>, 1, 32, 1, 128, false,
                out);
}
int run_fault(int fault, unsigned threads) {
  unsigned flag = 0;
  return launch(fault_kernel, 2, threads, 2, 64, false, fault, &flag);
}
int run_empty(unsigned grid, unsigned block, unsigned cluster, size_t shared_bytes) {
  return launch(fault_kernel, grid, block, cluster, shared_bytes, false, int{kNone},
                static_cast<unsigned*>(nullptr));
}
int allow(bool large_cluster, int shared_bytes) {
  cudaFuncSetAttribute(fault_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, large_cluster);
  return cudaFuncSetAttribute(fault_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              shared_bytes);
}
int attribute(int id) {
  int device = -1, value = -1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(id), device);
  return value;
}
int active_blocks(int threads, size_t shared_bytes) {
  int blocks = -1;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fault_kernel, threads, shared_bytes);
  return blocks;
}
int active_clusters(unsigned threads, unsigned cluster) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cluster);
  config.blockDim = dim3(threads);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = -1;
  cudaOccupancyMaxActiveClusters(&clusters, fault_kernel, &config);
  return clusters;
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
void set_device(int multiprocessors, int major) {
  simt::multiprocessors = multiprocessors;
  simt::capability_major = major;
}
#endif

}  // extern "C"
