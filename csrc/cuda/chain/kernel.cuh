#pragma once
// The kernel of verify_chain, one for each variant. Rule token is read from top to bottom here,
// from opening a sequence to its outputs; in decide.cuh, which drafts are accepted; in
// residual.cuh, the token drawn after a rejection.
//   group            the thread blocks that work on one sequence, see cuda/block_group.cuh
//   direct           said of a row of probabilities that is used as P itself, see SequenceState
//   tile statistics  maxima and masses of the 512-entry warp tiles of a row, in global memory
//   decision         what the ChainVerifier does, in one thread of each block, between two actions
//   action           a piece of work for the threads of the group, see ChainRows and ChainResidual;
//                    the kernel calls each at one place, because code that is inlined twice costs
//                    registers
//   row-lazy, row-parallel  the schedules kLazy and kParallel of specdec/cuda_plan.h
#include "cuda/chain/block.cuh"
#include "cuda/chain/kernels.cuh"
#include "cuda/chain/residual.cuh"
#include "cuda/chain/rules.cuh"
#include "cuda/row/fill.cuh"
#include "cuda/row/filter.cuh"
#include "cuda/ticket.cuh"

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
  if (!job.plan.parallel || p.target_indptr.given()) return;
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

// The actions that measure rows.
template <Variant kVariant>
class ChainRows : ChainView<kVariant> {
  SPECDEC_CHAIN_VIEW(kVariant);

 public:
  __device__ ChainRows(BlockGroup& group, const ChainJob& job)
      : View(job, group.task<ChainTask>()), group_(group) {}

  // Computes the tile statistics of the current row and of its draft, side by side.
  __device__ void fill() const {
    if (thread_id() == 0) prepare_fills();
    __syncthreads();
    const int which = t_.row_fills[kTarget].beside_another ? warp_id() % 2
                      : measures(kTarget)                  ? kTarget
                                                           : kDraft;
    fill_tile_stats<Reads>(group_, t_.row_fills[which], kGeneral);
  }

  // kMeasureAll and kMeasure: computes row statistics from tile statistics.
  __device__ void measure() {
    if (measures_all() || !knows_row()) measure_rows();
    if constexpr (kGeneral) {
      if (!measures_all() && t_.has_draft && sparse() && !t_.draft.invalid_at_token) {
        look_up_sparse(group_, t_.draft);
      }
    }
  }

 private:
  // The use of the target row's tile statistics once filters are applied.
  __device__ Want target_want() const {
    return direct() ? Want::kLinear : rule_is(Rule::kMatch) ? Want::kGumbel : Want::kMass;
  }

  // For one thread.
  __device__ void prepare_fills() const {
    const int split = t_.filling ? t_.own_split : 0, splits = t_.filling ? job_.plan.splits : 1;
    const bool both = measures(kTarget) && measures(kDraft);
    const auto rate = [](float temperature) { return rate_of(inverse_temperature(temperature)); };
    t_.row_fills[kTarget] = {t_.row,
                             t_.tile_stats,
                             rate(t_.params.temperature),
                             first_want(target_want(), filtered(), t_.greedy),
                             {t_.seed, t_.position + t_.i, kSharedStream},
                             split,
                             splits,
                             both};
    t_.row_fills[kDraft] = {t_.draft.row,
                            t_.draft_tile_stats,
                            rate(t_.draft_temperature),
                            Want::kMass,
                            {},
                            split,
                            splits,
                            both};
  }

  __device__ bool measures_all() const { return action_is(Action::kMeasureAll); }

  // Measures the current row and its draft, or all rows: then the blocks of the group take turns,
  // and each tells the others what it found. With the statistics the entry of the drafted token is
  // read, so that no test waits for it. The result for a row that was not filled has no meaning and
  // is not used.
  __device__ void measure_rows() {
    const int blocks = measures_all() ? static_cast<int>(group_.size()) : 1;
#pragma unroll 1
    for (int turn = measures_all() ? static_cast<int>(group_.rank()) : 0; turn < turns();
         turn += blocks) {
      const Which which = turn < targets() ? kTarget : kDraft;
      if (!measures_all() && !measures(which)) continue;
      const int64_t row = row_of_turn(turn);
      const MeasuredRow measured = measure_row(row, which);
      if (!measures_all()) {
        if (thread_id() == 0) t_.measured[which] = measured;
      } else if (thread_id() < blocks) {
        *group_.remote(measured_row(row, which), thread_id()) = measured;
      }
    }
    if (measures_all()) group_.sync();
  }

  // Target rows come first.
  __device__ int targets() const {
    return measures_all() ? static_cast<int>(t_.num_drafts) + (t_.no_bonus ? 0 : 1) : 1;
  }
  __device__ int turns() const {
    // Rows of probabilities are not measured.
    const bool draft_rows = kVariant != Variant::kProbs && reads_draft() && !t_.greedy &&
                            p_.draft.form == DraftForm::kRows;
    return targets() + (!draft_rows ? 0 : measures_all() ? static_cast<int>(t_.num_drafts) : 1);
  }
  __device__ int64_t row_of_turn(int turn) const {
    return (measures_all() ? 0 : t_.i) + (turn < targets() ? turn : turn - targets());
  }

  __device__ MeasuredRow measure_row(int64_t row, Which which) {
    RowView view = which == kTarget
                       ? target_row(p_, t_, row)
                       : row_of(draft_source(), t_.b, draft_row(p_, t_, row), Read::kLogits);
    view.read = Reads::of(view.read);
    const TileStats tile_stats = tile_stats_of(row, which);
    // The entry is loaded while these are under way.
    const TileRun run(tile_stats, view.warp_tiles());
    MeasuredRow measured;
    measured.entry = entry_of_draft(row, which);
    measured.stats = read_row_stats(
        group_, view, tile_stats, run,
        which == kTarget ? t_.params : SequenceParams{t_.draft_temperature, 0, 1, 0},
        which == kTarget && filtered(), which == kTarget ? target_want() : Want::kMass,
        {t_.seed, t_.position + static_cast<uint64_t>(row), kSharedStream}, measured.token);
    return measured;
  }

  __device__ TileStats tile_stats_of(int64_t row, Which which) const {
    if (!measures_all()) return which == kTarget ? t_.tile_stats : t_.draft_tile_stats;
    return job_.tile_stats_array[t_.context * job_.context_tile_stats() + slot_of(row, which)];
  }

  // An entry, read in place: the wait for it is the one for the row's statistics.
  __device__ float known_at(RowView row, int64_t index) const {
    row.read = Reads::of(row.read);
    return at(row, index);
  }

  // The entry of drafted token i in its target row or in its draft row of logits, 0 if there is
  // none.
  __device__ float entry_of_draft(int64_t i, Which which) const {
    const int64_t x = i < t_.num_drafts ? drafted_token(p_, t_, i) : -1;
    if (which == kTarget) return x >= 0 && x < p_.vocab ? known_at(target_row(p_, t_, i), x) : 0;
    const DraftParams source = draft_source();
    const int64_t row = draft_row(p_, t_, i);
    if (x < 0 || !has_row(source, row)) return 0;
    const int64_t column = column_of(source.columns, source.vocab, x);
    return column < 0 ? 0 : known_at(row_of(source, t_.b, row, Read::kLogits), column);
  }

  BlockGroup& group_;
};

// Carries out actions until the verifier sets none. Little is kept in registers from one action to
// the next: the loops need them.
template <Variant kVariant>
__forceinline__ __device__ void run_actions(BlockGroup& group, const ChainJob& job) {
  ChainTask& t = group.task<ChainTask>();
  ChainVerifier<kVariant> verifier(job, t);
  ChainRows<kVariant> rows(group, job);
  ChainResidual<kVariant> residual(group, job);
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
          rows.fill();
          if (!t.filling) group.sync();
        }
        if (t.filling) break;
        [[fallthrough]];
      case Action::kMeasureAll:
        rows.measure();
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
        residual.sum_or_draw();
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

template <Variant kVariant>
ChainKernel& chain_kernel_of() {
  static ChainKernel kernel(chain_kernel<kVariant>, blocks_per_processor(kVariant));
  return kernel;
}

}  // namespace specdec::cuda
