#pragma once
// One sequence from its first target row to its outputs: one thread decides, all threads act.
#include "cuda/row/fill.cuh"
#include "cuda/row/filter.cuh"
#include "cuda/tree/decide.cuh"
#include "cuda/tree/residual.cuh"
#include "cuda/tree/siblings.cuh"
#include "cuda/tree/traversal.cuh"

namespace specdec::cuda {

// TreeAction::kMeasure: the statistics of a target row, or of the draft row of the child.
class RowMeasurement {
 public:
  __device__ RowMeasurement(BlockGroup& group, const TreeJob& job)
      : group_(group), job_(job), t_(group.task<TreeTask>()) {}

  __device__ void run() {
    const RowFill fill = {t_.measured_row,
                          t_.measured_tile_stats,
                          rate_of(inverse_temperature(params().temperature)),
                          first_want(want(), filters(), !t_.measures_draft && t_.greedy),
                          noise(),
                          0,
                          1};
    fill_tile_stats<AnyRead>(group_, fill);
    group_.sync();
    group_.exchange_buffer = 0;
    int64_t token;
    const TileRun run(t_.measured_tile_stats, t_.measured_row.warp_tiles());
    const RowStats stats = read_row_stats(group_, t_.measured_row, t_.measured_tile_stats, run,
                                          params(), filters(), want(), noise(), token);
    if (thread_id() != 0) return;
    if (t_.measures_draft) {
      t_.q_stats = stats;
      t_.draft.row_checked = stats.valid;
      t_.draft.set(stats);
    } else {
      t_.stats = stats;
      t_.token = token;
    }
  }

 private:
  // Made again at each use, because it would occupy registers in between.
  __device__ GumbelNoise noise() const { return {t_.seed, t_.position + t_.depth, kSharedStream}; }
  __device__ bool filters() const { return !t_.measures_draft && t_.filtered; }
  __device__ SequenceParams params() const {
    return t_.measures_draft ? SequenceParams{t_.draft_temperature, 0, 1, 0} : t_.params;
  }
  __device__ Want want() const {
    return t_.measures_draft                 ? Want::kMass
           : t_.direct                       ? Want::kLinear
           : job_.p.rule == TreeRule::kMatch ? Want::kGumbel
                                             : Want::kMass;
  }

  BlockGroup& group_;
  const TreeJob& job_;
  TreeTask& t_;
};

// For one thread. Out of line, because it needs none of the registers that the loops over the
// vocabulary need.
template <class Verifier>
__noinline__ __device__ void decide_by(const TreeJob& job, bool begins) {
  Verifier verifier(job, *reinterpret_cast<TreeTask*>(shared_memory()->task));
  begins ? verifier.begin() : verifier.go_on();
}

// Decides at the beginning, or after an action.
inline __device__ void decide(const TreeJob& job, const TreeTask& t, bool begins) {
  const bool traversal = job.p.rule == TreeRule::kTraversal && !t.greedy;
  traversal ? decide_by<TraversalVerifier>(job, begins) : decide_by<TopDownVerifier>(job, begins);
}

__forceinline__ __device__ void verify(BlockGroup& group, const TreeJob& job, int64_t b) {
  TreeTask& t = group.task<TreeTask>();
  const Siblings siblings(group, job);
  clear_outputs(group, job.p, b);
  __syncthreads();
  if (thread_id() == 0) open_sequence(job.p, b, t);
  __syncthreads();
  group.exchange_buffer = 0;
  check_nodes(group, job.p, t);
  if (thread_id() == 0) {
    if (t.nothing_to_verify || t.max_tokens == 0) {
      t.action = TreeAction::kDone;
    } else {
      decide(job, t, true);
    }
  }
  __syncthreads();
  while (t.action != TreeAction::kDone) {
    // After a barrier either exchange buffer may be used next. Choosing a fixed one here saves the
    // register that would keep the choice through an iteration.
    group.exchange_buffer = 0;
    switch (t.action) {
      case TreeAction::kMeasure:
        if (t.gathers_children) siblings.gather();
        RowMeasurement(group, job).run();
        break;
      case TreeAction::kLookUpSparse:
        look_up_sparse(group, t.draft);
        break;
      case TreeAction::kFindChild:
        siblings.find_next();
        break;
      case TreeAction::kCompareChildren:
        siblings.compare();
        break;
      case TreeAction::kSumResidualOfFew:
        sum_residual_of_few(group, t.draft, t.row, t.stats, t.target_scale, t.positive_sum,
                            t.second_sum);
        if (thread_id() == 0) t.drafts_valid = true;
        break;
      default:
        ResidualScan(group, job).run();
    }
    __syncthreads();
    if (thread_id() == 0) {
      decide(job, t, false);
    }
    __syncthreads();
  }
  if (group.rank() != 0 || thread_id() != 0) return;
  job.p.num_accepted[t.b] = t.accepted;
  job.p.status[t.b] = t.status;
}

}  // namespace specdec::cuda
