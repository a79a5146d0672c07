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

  // The law of one row: the target's, or the candidate's draft.
  __device__ void measure() {
    const RaceNoise noise{t_.seed, t_.position + t_.depth, kSharedStream};
    fill_slot(team_, t_.source, t_.sink, first_want(want(), filters(), !t_.of_draft && t_.point),
              inverse_temperature(params().temperature), noise);
    team_.sync();
    team_.turn = 0;
    int64_t token;
    const Law law = read_law(team_, t_.source, t_.sink, params(), filters(), want(), noise, token);
    if (thread_id() != 0) return;
    if (t_.of_draft) {
      t_.q_law = law;
      t_.draft.checked = law.sound;
      t_.draft.set(law);
    } else {
      t_.law = law;
      t_.token = token;
    }
  }

 private:
  __device__ bool filters() const { return !t_.of_draft && t_.filtered; }
  __device__ Params params() const {
    return t_.of_draft ? Params{t_.q_temperature, 0, 1, 0} : t_.params;
  }
  __device__ Want want() const {
    return t_.of_draft                       ? Want::kMass
           : t_.direct                       ? Want::kLinear
           : job_.p.rule == TreeRule::kMatch ? Want::kRace
                                             : Want::kMass;
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
      case TreeAction::kLookUp:
        look_up_sparse(team, t.draft);
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
