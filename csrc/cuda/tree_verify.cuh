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
    if (measures(0) || measures(1)) team_.sync();
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

// Verdict on sequence b.
__forceinline__ __device__ void verify(Team& team, const TreeJob& job, int64_t b) {
  TreeTask& t = team.task<TreeTask>();
  const TreeChildren children(team, job);
  TreeWalkJudge walk(job, t);
  TreeVisitJudge visit(job, t);
  clear_outputs(team, job.p, b);
  if (thread_id() == 0) open_sequence(job.p, b, t);
  __syncthreads();
  check_nodes(team, job.p, t);
  const bool visits = job.p.rule == TreeRule::kTraversal && !t.point;
  if (thread_id() == 0) {
    if (t.over || t.most == 0) {
      t.action = TreeAction::kDone;
    } else {
      visits ? visit.begin() : walk.begin();
    }
  }
  __syncthreads();
  while (t.action != TreeAction::kDone) {
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
      visits ? visit.go_on() : walk.go_on();
    }
    __syncthreads();
  }
  if (team.rank != 0 || thread_id() != 0) return;
  job.p.num_accepted[b] = t.accepted;
  job.p.status[b] = t.status;
}

}  // namespace specdec
