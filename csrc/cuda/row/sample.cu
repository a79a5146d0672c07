// The op sample on CUDA devices, in one launch: blocks that share a row compute the statistics of
// its warp tiles, and the last of them draws.
#include "cuda/launch.cuh"
#include "cuda/row/summary.cuh"
#include "cuda/ticket.cuh"
#include "specdec/sample.h"

namespace specdec::cuda {
namespace {

struct SampleJob {
  SampleParams p;
  TileStatsArray tile_stats;    // [R]
  unsigned long long* tickets;  // [R]
  uint64_t launch_id;
  int splits;
};

struct SampleShared : BlockShared {
  RowTask task;
  RowSummary summary;
  Arrival arrival;
};

__device__ void write(const SampleParams& p, int64_t r, int64_t token, const RowStats& stats,
                      double logprob, int32_t status) {
  p.tokens[r] = token;
  p.logprobs[r] = static_cast<float>(logprob);
  p.logsumexp[r] = status != 0 || stats.one_hot ? 0 : row_logsumexp(stats);
  p.threshold[r] = status != 0 ? 0 : stats.threshold;
  p.status[r] = status;
}

// Draws from a row whose tile statistics are complete.
__device__ void finish(ThreadBlock& block, const SampleJob& job, int64_t r, SampleShared& s) {
  Candidates& candidates = candidates_of<SampleShared>();
  const RowTask& t = s.task;
  const RowSummary& row = s.summary;
  summarise(block, t, candidates, s.summary);
  __syncthreads();
  const RowStats& stats = row.stats;
  int64_t token = row.token;
  if (stats.valid && token < 0) {
    const double u = uniform(t.noise.seed, t.noise.position, t.noise.stream);
    if (row.listed < 0) {
      token = draw_from_row(block, t.row, t.tile_stats, stats, u);
    } else {
      token = draw_listed(candidates, candidates.total, t.row.vocab, u);
    }
  }
  if (thread_id() != 0) return;
  const double logprob = stats.valid ? stats.logprob(at(t.row, token)) : 0;
  const bool any = stats.valid || allows_any(t.row.allowed, t.row.vocab);
  const int32_t status = stats.valid ? 0 : any ? kTargetInvalid : kNothingAllowed;
  write(job.p, r, stats.valid ? token : -1, stats, logprob, status);
}

__global__ void __launch_bounds__(kThreads, kBlocksWithFewRegisters)
    sample_kernel(const __grid_constant__ SampleJob job) {
  auto& s = *shared_memory<SampleShared>();
  ThreadBlock block(s);
  const int64_t r = blockIdx.x / static_cast<unsigned>(job.splits);
  const auto split = static_cast<int>(blockIdx.x % static_cast<unsigned>(job.splits));
  if (thread_id() == 0) {
    begin_arrivals(job.tickets + r, job.launch_id, job.splits);
    const SampleParams& p = job.p;
    const SequenceParams params = params_of(p.sampling, r);
    const GumbelNoise noise = {static_cast<uint64_t>(p.seeds[r]),
                               static_cast<uint64_t>(p.positions[r]), p.stream};
    open_row(RowView(p.logits, r, 0, p.vocab), job.tile_stats[r], params,
             p.gumbel ? Want::kGumbel : Want::kMass,
             params.temperature > 0 && params.filters(p.vocab), noise, split, job.splits, s.task);
  }
  __syncthreads();
  if (!s.task.params.in_range()) {
    if (split == 0 && thread_id() == 0) write(job.p, r, -1, {}, 0, kBadParameter);
    return;
  }
  fill_tile_stats(s.task);
  if (!arrive(s.arrival, job.tickets + r, job.splits, false).last) return;
  finish(block, job, r, s);
}

// Lays the arrays of a call out in its workspace; returns their size.
int64_t lay_out(SampleJob& job, char* workspace) {
  const SampleParams& p = job.p;
  Layout layout(workspace);
  layout.array(job.tickets, p.num_rows);
  job.tile_stats =
      layout.statistics(p.num_rows, warp_tiles_of(p.vocab), needs_best(p.sampling, p.gumbel));
  return layout.bytes();
}

}  // namespace

int64_t workspace_bytes(const SampleParams& p) {
  SampleJob job = {};
  job.p = p;
  return lay_out(job, nullptr);
}

int sample(const SampleParams& p, void* workspace, void* stream) {
  if (p.num_rows == 0) return cudaSuccess;
  int processors = 0;
  const cudaError_t status = multiprocessors(&processors);
  if (status != cudaSuccess) return status;
  SampleJob job = {};
  job.p = p;
  lay_out(job, static_cast<char*>(workspace));
  job.launch_id = next_launch_id();
  job.splits = splits_of(processors, p.num_rows, warp_tiles_of(p.vocab));
  const size_t shared = shared_bytes<SampleShared>(may_filter(p.sampling, p.vocab));
  return launch_blocks(sample_kernel, job, p.num_rows * job.splits, shared, stream);
}

}  // namespace specdec::cuda
