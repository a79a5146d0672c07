// The op sample on CUDA devices.
#include "cuda/launch.cuh"
#include "cuda/row/fill.cuh"
#include "cuda/row/filter.cuh"
#include "cuda/ticket.cuh"
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
  int64_t r;
  SequenceParams params;
  RowFill fill;
  bool filtered;
  RowStats stats;
};

__device__ Want want(const SampleParams& p, const SampleTask& task) {
  if (task.params.temperature == 0) return Want::kArgmax;
  return p.gumbel ? Want::kGumbel : Want::kMass;
}

// Opens row r. For one thread.
__device__ void open(const BlockGroup& group, const SampleJob& job, int64_t r, SampleTask& task) {
  const SampleParams& p = job.p;
  const unsigned long long seen = job.plan.parallel ? word_of(job.tickets + r) : 0;
  task.r = r;
  task.params = params_of(p.sampling, r);
  task.filtered = task.params.temperature > 0 && task.params.filters(p.vocab);
  // Row-lazy: rows alternate between two sets of tile statistics, because a block that is ahead
  // fills the next one while others still read.
  const int64_t groups = gridDim.x / group.size();
  const int64_t at = job.plan.parallel ? r : group.index() * 2 + r / groups % 2;
  task.fill = {RowView(p.logits, r, 0, p.vocab),
               job.tile_stats_array[at],
               rate_of(inverse_temperature(task.params.temperature)),
               task.filtered ? Want::kMass : want(p, task),
               {static_cast<uint64_t>(p.seeds[r]), static_cast<uint64_t>(p.positions[r]), p.stream},
               static_cast<int>(group.index() % job.plan.splits),
               job.plan.splits};
  if (job.plan.parallel) {
    begin_arrivals(group, job.tickets + r, seen, job.launch_id, job.plan.splits);
  }
}

struct Sampled {
  int64_t token;
  double logprob, logsumexp;
  float threshold;
  int32_t status;
};

__device__ Sampled fault(int32_t status) { return {-1, 0, 0, 0, status}; }

__device__ int64_t draw(const BlockGroup& group, const RowFill& fill, const WarpTileMasses& masses,
                        const RowStats& stats, double u) {
  int64_t rest;
  const int64_t warp_tile = masses.choose(group, u, rest);
  TileValues tile = call_read_warp_tile<KnownRead<Read::kLogits>>(fill.row, warp_tile);
  weigh_tile(tile.values, fill.tile_stats.maxima[warp_tile], rate_of(stats.inv_t), stats.threshold);
  return warp_tile * kWarpTile + warp_tile_pick(tile.values, fill.row.wide(), rest);
}

// Draws the token from complete tile statistics. Only the first thread returns it.
__device__ Sampled finish(BlockGroup& group, const SampleParams& p, SampleTask& task) {
  if (!task.params.in_range()) return fault(kBadParameter);
  const RowFill& fill = task.fill;
  const RowStats& stats = task.stats;
  TileRun run(fill.tile_stats, fill.row.warp_tiles());
  {
    const RowStats unfiltered = row_stats_of(group, fill.tile_stats, run, task.params.temperature);
    if (thread_id() == 0) task.stats = unfiltered;
    __syncthreads();
  }
  if (!stats.valid) return fault(kTargetInvalid);
  if (stats.one_hot) {
    return {argmax(group, fill.tile_stats, fill.row.warp_tiles(), stats.max), 0, 0, stats.max, 0};
  }
  if (task.filtered) {
    const float threshold =
        filter_row(group, fill.row, fill.tile_stats, task.params, want(p, task), fill.noise, stats);
    if (thread_id() == 0) task.stats.threshold = threshold;
    __syncthreads();
    run = TileRun(fill.tile_stats, fill.row.warp_tiles());
  }
  const WarpTileMasses masses(group, fill.tile_stats, fill.row.warp_tiles(), run, stats.max,
                              stats.inv_t);
  if (thread_id() == 0) task.stats.log_sum = masses.log_sum();
  const GumbelNoise& noise = fill.noise;
  const int64_t token =
      p.gumbel
          ? gumbel_winner(group, fill.tile_stats, fill.row.warp_tiles(), stats)
          : draw(group, fill, masses, stats, uniform(noise.seed, noise.position, noise.stream));
  if (thread_id() != 0) return {};
  return {token, stats.logprob(call_at<KnownRead<Read::kLogits>>(fill.row, token)),
          row_logsumexp(stats), stats.threshold, 0};
}

__global__ void __launch_bounds__(kThreads, kBlocksWithFewRegisters)
    sample_kernel(const __grid_constant__ SampleJob job) {
  BlockGroup group = BlockGroup::mine();
  SampleTask& task = group.task<SampleTask>();
  for (int64_t r = group.index() / job.plan.splits; r < job.p.num_rows;
       r = task.r + gridDim.x / group.size()) {
    __syncthreads();
    if (thread_id() == 0) open(group, job, r, task);
    __syncthreads();
    if (task.params.in_range()) fill_tile_stats<KnownRead<Read::kLogits>>(group, task.fill);
    if (!job.plan.parallel) {
      group.sync();
    } else if (!last_group(group, job.tickets + task.r, job.plan.splits)) {
      return;
    }
    const Sampled sampled = finish(group, job.p, task);
    if (group.rank() != 0 || thread_id() != 0) continue;
    const SampleParams& p = job.p;
    p.tokens[task.r] = sampled.token;
    p.logprobs[task.r] = static_cast<float>(sampled.logprob);
    p.logsumexp[task.r] = sampled.logsumexp;
    p.threshold[task.r] = sampled.threshold;
    p.status[task.r] = sampled.status;
  }
}

GroupKernel<SampleJob> kernel(sample_kernel, kBlocksWithFewRegisters);

}  // namespace

int plan_sample(const SampleParams& p, const CudaRequest& request, CudaPlan* plan) {
  Device device;
  const cudaError_t status = kernel.device(&device);
  if (status != cudaSuccess) return status;
  const int64_t warp_tiles = warp_tiles_of(p.vocab);
  *plan = make_plan(request, device, {p.num_rows, 1, warp_tiles, may_filter(p.sampling, p.vocab)});
  const int64_t tile_stats_array = plan->parallel ? p.num_rows : 2 * plan->groups;
  plan->workspace_bytes =
      tile_stats_array * TileStatsArray::bytes(warp_tiles, needs_best(p.sampling, p.gumbel)) +
      (p.num_rows + 1) / 2 * 16;
  return cudaSuccess;
}

int sample(const SampleParams& p, const CudaPlan& plan, void* workspace, void* stream) {
  if (p.num_rows == 0) return cudaSuccess;
  SampleJob job = {};
  job.p = p;
  job.plan = plan;
  job.tickets = static_cast<unsigned long long*>(workspace);
  // The tile statistics are aligned to 16 bytes.
  job.tile_stats_array = {static_cast<char*>(workspace) + (p.num_rows + 1) / 2 * 16,
                          warp_tiles_of(p.vocab), needs_best(p.sampling, p.gumbel)};
  job.launch_id = next_launch_id();
  return kernel.launch(job, stream);
}

}  // namespace specdec::cuda
