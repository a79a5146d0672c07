// The op verify_chain on CUDA devices, in two launches, rule block in three:
//   rows    (rows.cuh)   measures rows; direct rows need no measuring
//   block   (block.cuh)  rule block: sums the residual of each drafted row
//   decide  (emit.cuh)   decides, and draws the token that follows the accepted drafts
#include "cuda/chain/emit.cuh"
#include "cuda/chain/rows.cuh"
#include "cuda/launch.cuh"
#include "specdec/chain.h"

namespace specdec::cuda {
namespace {

// Whether every target row that is read at all is direct.
bool all_direct(const ChainParams& p) {
  const SamplingParams& s = p.sampling;
  return p.kind == Kind::kProbs && p.reads_draft() && p.target.allowed.words == nullptr &&
         s.temperatures == nullptr && s.temperature == 1 && !may_filter(s, p.vocab);
}

// Lays the arrays of a call out in its workspace; returns their size.
int64_t lay_out(ChainJob& job, char* workspace) {
  const ChainParams& p = job.p;
  const bool block = p.rule == Rule::kBlock;
  Layout layout(workspace);
  layout.array(job.summaries, p.batch * job.rows());
  layout.array(job.words, p.batch * job.words_of_sequence());
  layout.array(job.lists, filters(p) ? p.batch * (p.gamma + 1) * most_listed(p.vocab) : 0);
  job.tile_stats = layout.statistics(p.batch * job.rows(), warp_tiles_of(p), needs_best(p));
  job.sums =
      layout.statistics(p.batch * job.residuals() * ChainJob::kSums, warp_tiles_of(p), false);
  layout.array(job.block_sums, block ? p.batch * p.gamma : 0);
  layout.array(job.block_drafts, block ? p.batch * (p.gamma + 1) : 0);
  layout.array(job.block_ends, block ? p.batch : 0);
  return layout.bytes();
}

ChainJob job_of(const ChainParams& p) {
  ChainJob job = {};
  job.p = p;
  job.measures_targets = !all_direct(p);
  job.measures_drafts = measures_drafts(p);
  return job;
}

}  // namespace

int64_t workspace_bytes(const ChainParams& p) {
  ChainJob job = job_of(p);
  return lay_out(job, nullptr);
}

int verify_chain(const ChainParams& p, void* workspace, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  int processors = 0;
  cudaError_t status = multiprocessors(&processors);
  if (status != cudaSuccess) return status;
  ChainJob job = job_of(p);
  lay_out(job, static_cast<char*>(workspace));
  job.launch_id = next_launch_id();
  const int64_t tiles = warp_tiles_of(p);
  const auto launch = [&](void (*kernel)(ChainJob), int64_t units, size_t shared) {
    if (units == 0 || status != cudaSuccess) return;
    job.splits = splits_of(processors, units, tiles);
    status = launch_blocks(kernel, job, units * job.splits, shared, stream);
  };
  launch(rows_kernel, p.batch * job.rows(), shared_bytes<RowsShared>(filters(p)));
  if (p.rule == Rule::kBlock) {
    launch(block_kernel, p.batch * std::max<int64_t>(p.gamma, 1), sizeof(BlockRowShared));
  }
  launch(decide_kernel, p.batch, shared_bytes<EmitShared>(filters(p)));
  return status;
}

}  // namespace specdec::cuda
