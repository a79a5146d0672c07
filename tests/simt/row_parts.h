#pragma once
// Parts of csrc/cuda/row in kernels of their own, for arguments that no call of an op can give.
#include "cuda/launch.cuh"
#include "cuda/row/fill.cuh"
#include "cuda/ticket.cuh"

namespace specdec::cuda {

template <class... Params, class... Args>
int launch_one_block(void (*kernel)(Params...), Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(BlockShared);
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// out: the tile that `choose` finds for u, and the mass of that tile before the point.
__global__ void choose_kernel(TileStats tile_stats, int64_t warp_tiles, double u, int64_t* out) {
  ThreadBlock block(*shared_memory<BlockShared>());
  const TileRun run(tile_stats, warp_tiles);
  const float max = run.largest(block, tile_stats);
  const WarpTileMasses masses(block, tile_stats, warp_tiles, run, max, 1.0f);
  int64_t rest = 0;
  const int64_t warp_tile = masses.choose(block, u, rest);
  if (thread_id() == 0) {
    out[0] = warp_tile;
    out[1] = rest;
  }
}

__global__ void largest_kernel(TileStats tile_stats, int64_t warp_tiles, float* out) {
  ThreadBlock block(*shared_memory<BlockShared>());
  const TileRun run(tile_stats, warp_tiles);
  const float largest = run.largest(block, tile_stats);
  if (thread_id() == 0) *out = largest;
}

// A block begins a count of arrivals, and arrives. out: whether it is the last, and whether one of
// them has skipped its part.
__global__ void arrive_kernel(unsigned long long* ticket, uint64_t launch_id, unsigned count,
                              bool skips, int* out) {
  if (thread_id() != 0) return;
  begin_arrivals(ticket, launch_id, count);
  const Arrival arrival = arrive(ticket, count, skips);
  out[0] = arrival.last;
  out[1] = arrival.skipped;
}

// out: the limit after it was lowered, unless `limit` is negative.
__global__ void limit_kernel(unsigned long long* word, uint64_t launch_id, int limit, int* out) {
  if (thread_id() != 0) return;
  if (limit >= 0) lower_limit(word, launch_id, limit);
  *out = limit_of(word, launch_id);
}

// masses: of the warp tiles of a row of logits, on one scale. log_sum: as in RowStats.
__global__ void measure_kernel(RowFill fill, float inv_t, int64_t* masses, double* log_sum) {
  ThreadBlock block(*shared_memory<BlockShared>());
  fill_tile_stats(fill);
  __syncthreads();
  const int64_t warp_tiles = fill.row.warp_tiles();
  const TileRun run(fill.tile_stats, warp_tiles);
  const float max = run.largest(block, fill.tile_stats);
  const double sum = WarpTileMasses(block, fill.tile_stats, warp_tiles, run, max, inv_t).log_sum();
  const WarpTileScale scale(fill.tile_stats, warp_tiles, max, inv_t, false);
  for (int64_t i = thread_id(); i < warp_tiles; i += kThreads) {
    masses[i] = scale.mass_of(static_cast<int>(i));
  }
  if (thread_id() == 0) *log_sum = sum;
}

// out: the mass of a warp tile in which every weight is `weight`, in units.
__global__ void warp_mass_kernel(float weight, int64_t* out) {
  float weights[kPerLane];
  for (float& w : weights) w = weight;
  const int64_t mass = warp_mass(lane_units(weights, true));
  if (thread_id() == 0) *out = mass;
}

}  // namespace specdec::cuda

#define SPECDEC_EXPORT extern "C" __attribute__((visibility("default")))

// The tiles have masses of `units`, on the scales that the maxima give at temperature 1.
SPECDEC_EXPORT int simt_choose(int64_t* units, float* maxima, int64_t warp_tiles, double u,
                               int64_t* out) {
  return specdec::cuda::launch_one_block(specdec::cuda::choose_kernel,
                                         specdec::cuda::TileStats{units, nullptr, maxima},
                                         warp_tiles, u, out);
}

// Returns the logarithm of the sum of exp((l - max) / T) over a row of float32 logits.
SPECDEC_EXPORT double simt_measure(const float* logits, int64_t vocab, float temperature,
                                   int64_t* masses) {
  namespace cuda = specdec::cuda;
  const auto tiles = static_cast<size_t>(specdec::cuda::warp_tiles_of(vocab));
  std::vector<int64_t> units(tiles);
  std::vector<float> maxima(tiles);
  cuda::RowFill fill = {};
  fill.row.data = logits;
  fill.row.vocab = vocab;
  fill.row.dtype = specdec::DType::kFloat32;
  fill.row.read = specdec::Read::kLogits;
  fill.tile_stats = {units.data(), nullptr, maxima.data()};
  const float inv_t = specdec::inverse_temperature(temperature);
  fill.rate = cuda::rate_of(inv_t);
  fill.want = cuda::Want::kMass;
  fill.splits = 1;
  double log_sum = 0;
  cuda::launch_one_block(cuda::measure_kernel, fill, inv_t, masses, &log_sum);
  return log_sum;
}

// Returns 1 for the last of `count` arrivals, and 2 more if one of them has skipped its part.
SPECDEC_EXPORT int simt_arrive(uint64_t* ticket, uint64_t launch_id, unsigned count, bool skips) {
  unsigned long long word = *ticket;
  int out[2] = {};
  specdec::cuda::launch_one_block(specdec::cuda::arrive_kernel, &word, launch_id, count, skips,
                                  static_cast<int*>(out));
  *ticket = word;
  return out[0] + 2 * out[1];
}

SPECDEC_EXPORT int simt_limit(uint64_t* word, uint64_t launch_id, int limit) {
  unsigned long long as_device = *word;
  int out = 0;
  specdec::cuda::launch_one_block(specdec::cuda::limit_kernel, &as_device, launch_id, limit, &out);
  *word = as_device;
  return out;
}

// Returns the largest maximum, NaN if one is.
SPECDEC_EXPORT float simt_largest(float* maxima, int64_t warp_tiles) {
  std::vector<int64_t> units(static_cast<size_t>(warp_tiles), 0);
  float out = 0;
  specdec::cuda::launch_one_block(specdec::cuda::largest_kernel,
                                  specdec::cuda::TileStats{units.data(), nullptr, maxima},
                                  warp_tiles, &out);
  return out;
}

// Returns the number of units in a weight of 1.
SPECDEC_EXPORT double simt_warp_mass(float weight, int64_t* out) {
  specdec::cuda::launch_one_block(specdec::cuda::warp_mass_kernel, weight, out);
  return specdec::cuda::kUnit;
}
