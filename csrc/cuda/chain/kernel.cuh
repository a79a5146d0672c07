#pragma once
// The kernel of verify_chain, one for each variant.
//   group            the thread blocks that work on one sequence, see cuda/block_group.cuh
//   direct           said of a row of probabilities that is used as P itself, see SequenceState
//   tile statistics  maxima and masses of the 512-entry warp tiles of a row, in global memory
//   decision         what the ChainVerifier does, in one thread of each block, between two actions
//   action           a piece of work for the threads of the group, see ChainActions and ChainSums
//   row-lazy, row-parallel  the schedules kLazy and kParallel of specdec/cuda_plan.h
#include "cuda/chain/sums.cuh"
#include "cuda/launch.cuh"

namespace specdec::cuda {

// Row-parallel: how many groups share a sequence; the row of this group, and its split of it.
__forceinline__ __device__ unsigned sharing_groups(const ChainJob& job) {
  return static_cast<unsigned>((job.p.gamma + 1) * job.plan.splits);
}
__forceinline__ __device__ int64_t own_row(const BlockGroup& group, const ChainJob& job) {
  return group.index() / static_cast<unsigned>(job.plan.splits) %
         static_cast<unsigned>(job.p.gamma + 1);
}
__forceinline__ __device__ int own_split(const BlockGroup& group, const ChainJob& job) {
  return static_cast<int>(group.index() % static_cast<unsigned>(job.plan.splits));
}

// Row-parallel: brings the first warp tile of each warp from memory to the L2 cache while the
// sequence is opened. Where its row lies is then known only if the target is not ragged.
__forceinline__ __device__ void prefetch_own_row(const BlockGroup& group, const ChainJob& job,
                                                 int64_t b) {
  const ChainParams& p = job.p;
  if (!job.plan.parallel || p.target_indptr != nullptr) return;
  const int64_t row = own_row(group, job);
  const bool both = p.reads_draft() && p.draft.form == DraftForm::kRows && row < p.gamma;
  const RowView view = both && warp_id() % 2 == 1 ? row_of(p.draft, b, row, Read::kLogits)
                                                  : RowView(p.target, b, row, p.vocab);
  const int64_t warp_tile = share_of_warps(group.first_warp_tile(own_split(group, job)), both);
  const int line = 128 / (view.wide() ? 4 : 2), begin = lane_id() * line;
  const int64_t first = warp_tile * kWarpTile + begin;
  if (begin < kWarpTile && first < view.vocab) prefetch_to_l2(view.part(first, 1).data);
}

// Opens sequence b. Loads of drafted tokens, seed, position, sampling parameters and offsets are
// under way together.
__forceinline__ __device__ void open(const BlockGroup& group, const ChainJob& job, int64_t b,
                                     ChainTask& t) {
  if (warp_id() == 1) {
    // Read once: no row that is opened later waits for its token.
    t.first_drafted[lane_id()] = lane_id() < job.p.gamma ? job.p.drafted(b, lane_id()) : -1;
  }
  if (thread_id() == 0) {
    const bool shares = job.plan.parallel;
    const unsigned long long ticket = shares ? word_of(job.tickets + b) : 0;
    open_sequence(job.p, b, t);
    if (shares) begin_arrivals(group, job.tickets + b, ticket, job.launch_id, sharing_groups(job));
  }
  __syncthreads();
  if (warp_id() != 0) return;
  find_drafts(job.p, t);
  __syncwarp();
  if (lane_id() != 0) return;
  t.all_measured = job.plan.parallel && !t.nothing_to_verify && !t.direct && !t.filtered &&
                   job.p.rule != Rule::kMatch && 2 * job.row_tile_stats() <= kMostMeasuredRows;
  t.filling = job.plan.parallel;
  t.context = t.filling ? b : group.index();
  t.own_split = own_split(group, job);
  t.own_row = own_row(group, job);
  t.writes = t.rank == 0 && !t.filling;
  t.state = State::kBegin;
  t.action = Action::kDone;
}

// Carries out actions until the verifier sets none. Little is kept in registers from one action to
// the next: the loops need them.
template <Variant kVariant>
__forceinline__ __device__ void run_actions(BlockGroup& group, const ChainJob& job) {
  ChainTask& t = group.task<ChainTask>();
  ChainVerifier<kVariant> verifier(job, t);
  ChainActions<kVariant> actions(group, job);
  ChainSums<kVariant> sums(group, job);
  for (;;) {
    __syncthreads();
    if (thread_id() == 0) verifier.go_on();
    __syncthreads();
    // After a barrier either exchange buffer may be used next. Choosing a fixed one here saves the
    // register that would keep the choice through an iteration.
    group.exchange_buffer = 0;
    switch (t.action) {
      case Action::kMeasure:
        if (t.fills) {
          // Afterwards no block reads these tile statistics any more.
          if (!t.filling && job.plan.parallel) group.sync();
          actions.fill();
          if (!t.filling) group.sync();
        }
        if (t.filling) break;
        [[fallthrough]];
      case Action::kMeasureAll:
        actions.measure();
        if (t.action == Action::kMeasure) break;
        [[fallthrough]];
      case Action::kTestDrafts:
        if (warp_id() == 0) verifier.test_drafts();
        break;
      case Action::kEntropy:
      case Action::kCount:
      case Action::kResidual:
      case Action::kChoose:
      case Action::kDraw:
        sums.sum_or_draw();
        break;
      case Action::kDone:
        return;
    }
  }
}

// Verifies the sequence that was opened. In the row-parallel schedule a group first computes the
// tile statistics of its own row, or of its split of it; the last group to finish goes on and
// decides.
template <Variant kVariant>
__forceinline__ __device__ void verify(BlockGroup& group, const ChainJob& job) {
  ChainTask& t = group.task<ChainTask>();
  for (;;) {
    __syncthreads();
    if (t.writes) clear_outputs(job.p, t);
    run_actions<kVariant>(group, job);
    if (!t.filling) break;
    if (!last_group(group, job.tickets + t.b, sharing_groups(job))) return;
    if (thread_id() != 0) continue;
    t.filling = false;
    t.writes = t.rank == 0;
    t.state = State::kBegin;
    t.action = Action::kDone;
  }
  if (t.rank != 0 || thread_id() != 0) return;
  job.p.num_accepted[t.b] = t.accepted;
  job.p.status[t.b] = t.status;
}

// The kernels of all variants have this name, so that a profile shows the op.
template <Variant kVariant>
__global__ void __launch_bounds__(kThreads, blocks_per_processor(kVariant))
    chain_kernel(const __grid_constant__ ChainJob job) {
  BlockGroup group = BlockGroup::mine();
  ChainTask& t = group.task<ChainTask>();
  if (thread_id() == 0) {
    t.rank = group.rank();
    t.stats_buffer = 0;
    t.stats_filled = false;
  }
  // Row-parallel: the groups of a sequence follow each other, so that one of them decides while
  // those of later sequences still read.
  const unsigned sharing = job.plan.parallel ? sharing_groups(job) : 1;
  for (int64_t b = group.index() / sharing; b < job.p.batch; b = t.b + gridDim.x / group.size()) {
    if (kVariant == Variant::kLogits) prefetch_own_row(group, job, b);
    __syncthreads();
    open(group, job, b, t);
    verify<kVariant>(group, job);
  }
}

}  // namespace specdec::cuda
