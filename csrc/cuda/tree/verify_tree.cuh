#pragma once
// One tree from its first row to its verdict: judge, act.
#include "cuda/row/filter.cuh"
#include "cuda/tree/decide.cuh"
#include "cuda/tree/nodes.cuh"
#include "cuda/tree/residual.cuh"
#include "cuda/tree/traversal.cuh"

namespace specdec::cuda {

class TreeActions {
 public:
  __device__ TreeActions(BlockGroup& group, const TreeJob& job)
      : group_(group), job_(job), t_(group.task<TreeTask>()) {}

  // The law of one row: the target's, or the candidate's draft.
  __device__ void measure() {
    const GumbelNoise noise{t_.seed, t_.position + t_.depth, kSharedStream};
    fill_tile_stats(group_, t_.source, t_.sink,
                    first_want(want(), filters(), !t_.of_draft && t_.greedy),
                    inverse_temperature(params().temperature), noise);
    group_.sync();
    group_.turn = 0;
    int64_t token;
    const RowStats stats =
        read_row_stats(group_, t_.source, t_.sink, params(), filters(), want(), noise, token);
    if (thread_id() != 0) return;
    if (t_.of_draft) {
      t_.q_stats = stats;
      t_.draft.checked = stats.valid;
      t_.draft.set(stats);
    } else {
      t_.stats = stats;
      t_.token = token;
    }
  }

 private:
  __device__ bool filters() const { return !t_.of_draft && t_.filtered; }
  __device__ SequenceParams params() const {
    return t_.of_draft ? SequenceParams{t_.q_temperature, 0, 1, 0} : t_.params;
  }
  __device__ Want want() const {
    return t_.of_draft                       ? Want::kMass
           : t_.direct                       ? Want::kLinear
           : job_.p.rule == TreeRule::kMatch ? Want::kGumbel
                                             : Want::kMass;
  }

  BlockGroup& group_;
  const TreeJob& job_;
  TreeTask& t_;
};

// The first verdict, or the one after an action; for one thread. Out of line: it needs none of the
// registers that the loops over entries do.
template <class Judge>
__noinline__ __device__ void judge_by(const TreeJob& job, bool begins) {
  Judge judge(job, *reinterpret_cast<TreeTask*>(shared_memory()->task));
  begins ? judge.begin() : judge.go_on();
}

inline __device__ void judge(const TreeJob& job, const TreeTask& t, bool begins) {
  const bool visits = job.p.rule == TreeRule::kTraversal && !t.greedy;
  visits ? judge_by<TreeVisitJudge>(job, begins) : judge_by<TreeWalkJudge>(job, begins);
}

// Verdict on sequence b.
__forceinline__ __device__ void verify(BlockGroup& group, const TreeJob& job, int64_t b) {
  TreeTask& t = group.task<TreeTask>();
  const TreeChildren children(group, job);
  clear_outputs(group, job.p, b);
  __syncthreads();
  if (thread_id() == 0) open_sequence(job.p, b, t);
  __syncthreads();
  group.turn = 0;
  check_nodes(group, job.p, t);
  if (thread_id() == 0) {
    if (t.over || t.most == 0) {
      t.action = TreeAction::kDone;
    } else {
      judge(job, t, true);
    }
  }
  __syncthreads();
  while (t.action != TreeAction::kDone) {
    // Behind a barrier either buffer will do: whose turn it is need not be kept in a register.
    group.turn = 0;
    switch (t.action) {
      case TreeAction::kMeasure:
        if (t.gathers) children.gather();
        TreeActions(group, job).measure();
        break;
      case TreeAction::kLookUp:
        look_up_sparse(group, t.draft);
        break;
      case TreeAction::kSeek:
        children.seek();
        break;
      case TreeAction::kSurvey:
        children.survey(t.but);
        break;
      case TreeAction::kFew:
        few_differences(group, t.draft, t.row, t.stats, t.c, t.more, t.second);
        if (thread_id() == 0) t.valid = true;
        break;
      default:
        TreeScan(group, job).run();
    }
    __syncthreads();
    if (thread_id() == 0) {
      judge(job, t, false);
    }
    __syncthreads();
  }
  if (group.rank != 0 || thread_id() != 0) return;
  job.p.num_accepted[t.b] = t.accepted;
  job.p.status[t.b] = t.status;
}

}  // namespace specdec::cuda
