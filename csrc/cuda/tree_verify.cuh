#pragma once
// One tree from its first row to its verdict: judge, act.
#include "cuda/filter.cuh"
#include "cuda/tree_children.cuh"
#include "cuda/tree_judge.cuh"
#include "cuda/tree_scan.cuh"
#include "cuda/tree_visit.cuh"

namespace specdec {

class TreeTeam {
 public:
  __device__ TreeTeam(Team& team, const TreeJob& job)
      : team_(team), job_(job), t_(team.task<TreeTask>()) {}

  // The laws of the target's row and of the candidate's draft.
  __device__ void measure() {
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      if (!measures(which)) continue;
      fill_slot(team_, row(which), slot(which),
                first_want(want(which), filters(which), which == 0 && t_.point),
                inverse_temperature(params(which).temperature), noise());
    }
    measures(0) || measures(1) ? team_.sync() : __syncthreads();
    team_.turn = 0;
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      if (!measures(which)) continue;
      int64_t token;
      const Law law = read_law(team_, row(which), slot(which), params(which), filters(which),
                               want(which), noise(), token);
      if (thread_id() == 0) set(which, law, token);
    }
    if (t_.has_draft && t_.draft.form == DraftForm::kSparse && !t_.draft.fault) {
      look_up_sparse(team_, t_.draft);
    }
  }

 private:
  __device__ bool measures(int which) const {
    return which == 0 ? t_.measures : t_.has_draft && t_.draft.unmeasured();
  }
  __device__ bool filters(int which) const { return which == 0 && t_.filtered; }
  __device__ const RowView& row(int which) const { return which == 0 ? t_.row : t_.draft.row; }
  __device__ const Slot& slot(int which) const { return which == 0 ? t_.slot : t_.draft_slot; }
  __device__ Params params(int which) const {
    return which == 0 ? t_.params : Params{t_.q_temperature, 0, 1, 0};
  }
  __device__ Want want(int which) const {
    return which == 1                        ? Want::kMass
           : t_.direct                       ? Want::kLinear
           : job_.p.rule == TreeRule::kMatch ? Want::kRace
                                             : Want::kMass;
  }
  __device__ RaceNoise noise() const { return {t_.seed, t_.position + t_.depth, kSharedStream}; }
  __device__ void set(int which, const Law& law, int64_t token) {
    if (which == 0) {
      t_.law = law;
      t_.token = token;
      return;
    }
    t_.q_law = law;
    t_.draft.checked = law.sound;
    t_.draft.set(law);
  }

  Team& team_;
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
  const bool visits = job.p.rule == TreeRule::kTraversal && !t.point;
  visits ? judge_by<TreeVisitJudge>(job, begins) : judge_by<TreeWalkJudge>(job, begins);
}

// Verdict on sequence b.
__forceinline__ __device__ void verify(Team& team, const TreeJob& job, int64_t b) {
  TreeTask& t = team.task<TreeTask>();
  const TreeChildren children(team, job);
  clear_outputs(team, job.p, b);
  __syncthreads();
  if (thread_id() == 0) open_sequence(job.p, b, t);
  __syncthreads();
  team.turn = 0;
  check_nodes(team, job.p, t);
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
    team.turn = 0;
    switch (t.action) {
      case TreeAction::kMeasure:
        if (t.gathers) children.gather();
        TreeTeam(team, job).measure();
        break;
      case TreeAction::kSeek:
        children.seek();
        break;
      case TreeAction::kSurvey:
        children.survey(t.but);
        break;
      case TreeAction::kFew:
        few_differences(team, t.draft, t.row, t.law, t.c, t.more, t.second);
        if (thread_id() == 0) t.lawful = true;
        break;
      default:
        TreeScan(team, job).run();
    }
    __syncthreads();
    if (thread_id() == 0) {
      judge(job, t, false);
    }
    __syncthreads();
  }
  if (team.rank != 0 || thread_id() != 0) return;
  job.p.num_accepted[t.b] = t.accepted;
  job.p.status[t.b] = t.status;
}

}  // namespace specdec
