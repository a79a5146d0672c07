// The op verify_chain on CUDA devices. specdec/verification.h defines the terms of verification;
// the CUDA kernel adds these:
//   group            the thread blocks that work on one sequence, see cuda/block_group.cuh
//   direct           said of a row of probabilities that is used as P itself, see SequenceState
//   tile statistics  maxima and masses of the 512-entry warp tiles of a row, in global memory
//   decision         what the ChainVerifier does, in one thread of each block, between two actions
//   action           a piece of work for all threads of the group, see ChainActions
//   row-lazy, row-parallel  the schedules kLazy and kParallel of specdec/cuda_plan.h
#include "cuda/chain/actions.cuh"
#include "cuda/launch.cuh"
#include "specdec/chain.h"

namespace specdec::cuda {
namespace {

// Verifies sequence b. In the row-parallel schedule a group first computes the tile statistics of
// row `row`, or of a split of it; the last group to finish goes on and decides.
__forceinline__ __device__ void verify(BlockGroup& group, const ChainJob& job, int64_t b,
                                       int64_t context, int64_t row, int split) {
  ChainTask& t = group.task<ChainTask>();
  ChainActions actions(group, job, context);
  ChainVerifier verifier(job, t, context, group.rank);
  bool filling = job.plan.parallel;
  if (!filling) clear_outputs(group, job.p, b);
  __syncthreads();
  if (warp_id() == 0) {
    // Read once: no row that is opened later waits for its token.
    const int64_t drafted = lane_id() < job.p.gamma ? job.p.drafted(b, lane_id()) : -1;
    if (lane_id() == 0) open_sequence(job.p, b, t);
    t.first_drafted[lane_id()] = drafted;
    __syncwarp();
    find_drafts(job.p, t);
    __syncwarp();
    if (lane_id() == 0) {
      t.all_measured = filling && !t.nothing_to_verify && !t.greedy && !t.direct && !t.filtered &&
                       job.p.rule != Rule::kMatch && 2 * job.row_tile_stats() <= kMaxRowStatsInBins;
      t.action = Action::kDone;
      verifier.look_ahead(filling ? row : 0);
      if (!filling) {
        verifier.begin();
      } else if (!t.nothing_to_verify &&
                 (row < t.num_drafts || (row == t.num_drafts && !t.no_bonus))) {
        verifier.open_row_and_draft(row);
        t.fills = true;
      }
    }
  }
  __syncthreads();
  while (filling || t.action != Action::kDone) {
    // After a barrier either exchange buffer may be used next. Choosing a fixed one here saves the
    // register that would keep the choice through an iteration.
    group.exchange_buffer = 0;
    if (t.action == Action::kMeasure && t.fills) {
      // Afterwards no block reads these tile statistics any more.
      if (!filling && job.plan.parallel) group.sync();
      actions.fill(filling ? split : 0, filling ? job.plan.splits : 1);
    }
    if (filling) {
      const auto count = static_cast<unsigned>((job.p.gamma + 1) * job.plan.splits);
      if (!last_group(group, job.tickets + b, job.launch_id, count)) return;
      filling = false;
      clear_outputs(group, job.p, b);
      __syncthreads();
      actions.measure_all();
      if (thread_id() == 0) {
        verifier.look_ahead(0);
        verifier.begin();
      }
      __syncthreads();
      continue;
    }
    switch (t.action) {
      case Action::kCheckEntries:
        actions.check_entries(verifier);
        break;
      case Action::kMeasure:
        if (t.fills) group.sync();
        actions.measure();
        break;
      case Action::kEntropy:
      case Action::kResidual:
        actions.sum_over_row();
        break;
      case Action::kDraw:
        actions.draw();
        break;
      case Action::kDone:
        break;
    }
    __syncthreads();
    if (thread_id() == 0) {
      verifier.look_ahead(t.action == Action::kCheckEntries ? t.accepted_ahead : t.i + 1);
      verifier.go_on();
    }
    __syncthreads();
  }
  if (group.rank != 0 || thread_id() != 0) return;
  job.p.num_accepted[b] = t.accepted;
  job.p.status[b] = t.status;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    chain_kernel(const __grid_constant__ ChainJob job) {
  BlockGroup group = BlockGroup::mine();
  if (thread_id() == 0) {
    group.task<ChainTask>().stats_buffer = 0;
    group.task<ChainTask>().stats_filled = false;
  }
  __syncthreads();
  // Row-parallel: a group reads a split of one row, and may then decide on that sequence.
  const bool parallel = job.plan.parallel;
  const int64_t groups = gridDim.x / group.size, rows = job.p.gamma + 1;
  int64_t first = blockIdx.x / group.size;
  const auto split = static_cast<int>(first % job.plan.splits);
  first /= job.plan.splits;
  const int64_t row = parallel ? first % rows : 0;
  if (parallel) first /= rows;
  for (int64_t b = first; b < job.p.batch; b += groups) verify(group, job, b, first, row, split);
}

// Direct rows are read at single entries: there is nothing to compute for all rows beforehand.
bool reads_single_entries(const ChainParams& p) {
  const SamplingParams& s = p.sampling;
  const bool vectors = s.temperatures != nullptr || s.top_ks != nullptr || s.top_ps != nullptr ||
                       s.min_ps != nullptr;
  return p.kind == Kind::kProbs && p.reads_draft() && !vectors && s.temperature == 1 &&
         (s.top_k == 0 || s.top_k >= p.vocab) && s.top_p == 1 && s.min_p == 0;
}

bool needs_best(const ChainParams& p) {
  return cuda::needs_best(p.sampling, p.rule == Rule::kMatch || p.rule == Rule::kGreedy);
}

// Offsets in the workspace, which begins with the tickets.
struct WorkspaceLayout {
  int64_t records, tile_stats_array, bytes;

  WorkspaceLayout(const ChainParams& p, const ChainJob& job) {
    const int64_t contexts = job.plan.parallel ? p.batch : job.plan.groups;
    records = round_up(p.batch * 8);
    tile_stats_array = records;
    if (p.rule == Rule::kBlock) {
      tile_stats_array += round_up(contexts * job.plan.group_size * (p.gamma + 1) *
                                   static_cast<int64_t>(sizeof(ChainRecord)));
    }
    bytes = tile_stats_array + contexts * job.context_tile_stats() *
                                   TileStatsArray::bytes(warp_tiles_of(p), needs_best(p));
  }
};

}  // namespace

int plan_verify_chain(const ChainParams& p, const CudaRequest& request, CudaPlan* plan) {
  Device device;
  const cudaError_t status = current_device(chain_kernel, &device);
  if (status != cudaSuccess) return status;
  CudaRequest wanted = request;
  if (wanted.schedule == Schedule::kAuto && reads_single_entries(p))
    wanted.schedule = Schedule::kLazy;
  *plan = make_plan(wanted, device, p.batch, p.gamma + 1, warp_tiles_of(p), true);
  ChainJob job = {};
  job.p = p;
  job.plan = *plan;
  plan->workspace_bytes = WorkspaceLayout(p, job).bytes;
  return cudaSuccess;
}

int verify_chain(const ChainParams& p, const CudaPlan& plan, void* workspace, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  Device device;
  const cudaError_t status = current_device(chain_kernel, &device);
  if (status != cudaSuccess) return status;
  ChainJob job = {};
  job.p = p;
  job.plan = plan;
  const WorkspaceLayout layout(p, job);
  char* const memory = static_cast<char*>(workspace);
  job.tickets = reinterpret_cast<unsigned long long*>(memory);
  job.records = reinterpret_cast<ChainRecord*>(memory + layout.records);
  job.tile_stats_array = {memory + layout.tile_stats_array, warp_tiles_of(p), needs_best(p)};
  job.launch_id = next_launch_id();
  return launch_groups(chain_kernel, job, plan, device, stream);
}

}  // namespace specdec::cuda
