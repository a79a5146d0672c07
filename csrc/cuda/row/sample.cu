// The op sample on CUDA devices.
#include "cuda/launch.cuh"
#include "cuda/row/fill.cuh"
#include "cuda/row/filter.cuh"
#include "specdec/sample.h"

namespace specdec::cuda {
namespace {

struct SampleJob {
  SampleParams p;
  CudaPlan plan;
  TileStatsArray tile_stats_array;
  unsigned long long* tickets;  // [R], row-parallel
  uint64_t launch_id;
};

// The row that a group samples from and its parameters, in shared memory.
struct SampleTask {
  SequenceParams params;
  RowView row;
  TileStats tile_stats;
  GumbelNoise noise;
  bool filtered;

  __device__ SampleTask(const SampleParams& p, int64_t r, const TileStats& tile_stats)
      : params(params_of(p.sampling, r)),
        row(p.logits, r, 0, p.vocab),
        tile_stats(tile_stats),
        noise{static_cast<uint64_t>(p.seeds[r]), static_cast<uint64_t>(p.positions[r]), p.stream},
        filtered(params.temperature > 0 && params.filters(p.vocab)) {}
};

__device__ Want want(const SampleParams& p, const SampleTask& task) {
  if (task.params.temperature == 0) return Want::kArgmax;
  return p.gumbel ? Want::kGumbel : Want::kMass;
}

__device__ void write(const BlockGroup& group, const SampleParams& p, int64_t r, int64_t token,
                      double logprob, double logsumexp, float threshold, int32_t status) {
  if (group.rank != 0 || thread_id() != 0) return;
  p.tokens[r] = token;
  p.logprobs[r] = static_cast<float>(logprob);
  p.logsumexp[r] = logsumexp;
  p.threshold[r] = threshold;
  p.status[r] = status;
}

__device__ int64_t draw(const BlockGroup& group, const SampleTask& task,
                        const WarpTileMasses& masses, const RowStats& stats, double u) {
  int64_t rest;
  const int64_t warp_tile = masses.choose(group, u, rest);
  float values[kPerLane];
  read_warp_tile(task.row, warp_tile, values);
  weigh_tile(values, task.tile_stats.maxima[warp_tile], rate_of(stats.inv_t), stats.threshold);
  return warp_tile * kWarpTile + warp_tile_pick(values, task.row.wide(), rest);
}

// Draws the token from complete tile statistics.
__device__ void finish(BlockGroup& group, const SampleParams& p, int64_t r) {
  const SampleTask& task = group.task<SampleTask>();
  if (!task.params.in_range()) return write(group, p, r, -1, 0, 0, 0, kBadParameter);
  const int64_t warp_tiles = task.row.warp_tiles();
  RowStats stats = row_stats_of(group, task.tile_stats, warp_tiles, task.params.temperature);
  if (!stats.valid) return write(group, p, r, -1, 0, 0, 0, kTargetInvalid);
  if (stats.one_hot) {
    return write(group, p, r, argmax(group, task.tile_stats, warp_tiles, stats.max), 0, 0,
                 stats.max, 0);
  }
  if (task.filtered) {
    filter_row(group, task.row, task.tile_stats, task.params, want(p, task), task.noise, stats);
  }
  const WarpTileMasses masses(group, task.tile_stats, warp_tiles, stats.max, stats.inv_t);
  stats.log_sum = log_of(masses.sum());
  const GumbelNoise& noise = task.noise;
  const int64_t token = p.gumbel ? gumbel_winner(group, task.tile_stats, warp_tiles, stats)
                                 : draw(group, task, masses, stats,
                                        uniform(noise.seed, noise.position, noise.stream));
  write(group, p, r, token, stats.logprob(at(task.row, token)), row_logsumexp(stats),
        stats.threshold, 0);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    sample_kernel(const __grid_constant__ SampleJob job) {
  BlockGroup group = BlockGroup::mine();
  const bool parallel = job.plan.parallel;
  const int splits = job.plan.splits;
  const int64_t first = blockIdx.x / group.size, groups = gridDim.x / group.size;
  // Row-lazy: rows alternate between two sets of tile statistics, because a block that is ahead
  // fills the next one while others still read.
  int64_t tile_stats = parallel ? first / splits : first * 2;
  for (int64_t r = first / splits; r < job.p.num_rows; r += groups) {
    SampleTask& task = group.task<SampleTask>();
    __syncthreads();
    if (thread_id() == 0) task = SampleTask(job.p, r, job.tile_stats_array[tile_stats]);
    __syncthreads();
    if (task.params.in_range()) {
      fill_tile_stats(group, task.row, task.tile_stats,
                      task.filtered ? Want::kMass : want(job.p, task),
                      inverse_temperature(task.params.temperature), task.noise,
                      static_cast<int>(first % splits), splits);
    }
    if (!parallel) {
      group.sync();
      tile_stats ^= 1;
    } else if (!last_group(group, job.tickets + r, job.launch_id, splits)) {
      return;
    }
    finish(group, job.p, r);
  }
}

}  // namespace

int plan_sample(const SampleParams& p, const CudaRequest& request, CudaPlan* plan) {
  Device device;
  const cudaError_t status = current_device(sample_kernel, &device);
  if (status != cudaSuccess) return status;
  const SamplingParams& s = p.sampling;
  const bool reads_again = s.top_ks != nullptr || s.top_ps != nullptr || s.min_ps != nullptr ||
                           s.top_k > 0 || s.top_p < 1 || s.min_p > 0;
  const int64_t warp_tiles = warp_tiles_of(p.vocab);
  *plan = make_plan(request, device, p.num_rows, 1, warp_tiles, reads_again);
  const int64_t tile_stats_array = plan->parallel ? p.num_rows : 2 * plan->groups;
  plan->workspace_bytes =
      tile_stats_array * TileStatsArray::bytes(warp_tiles, needs_best(p.sampling, p.gumbel)) +
      (p.num_rows + 1) / 2 * 16;
  return cudaSuccess;
}

int sample(const SampleParams& p, const CudaPlan& plan, void* workspace, void* stream) {
  if (p.num_rows == 0) return cudaSuccess;
  Device device;
  const cudaError_t status = current_device(sample_kernel, &device);
  if (status != cudaSuccess) return status;
  SampleJob job = {};
  job.p = p;
  job.plan = plan;
  job.tickets = static_cast<unsigned long long*>(workspace);
  // The tile statistics are aligned to 16 bytes.
  job.tile_stats_array = {static_cast<char*>(workspace) + (p.num_rows + 1) / 2 * 16,
                          warp_tiles_of(p.vocab), needs_best(p.sampling, p.gumbel)};
  job.launch_id = next_launch_id();
  return launch_groups(sample_kernel, job, plan, device, stream);
}

}  // namespace specdec::cuda
