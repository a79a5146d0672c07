#pragma once
// One sequence from its first row to its verdict: fill, judge, act.
#include "cuda/chain/actions.cuh"

namespace specdec::cuda {

// Verdict on sequence b. With `parallel`, first the slots of row `row`, or a part of it; the last
// group to have filled its own goes on.
__forceinline__ __device__ void verify(BlockGroup& group, const ChainJob& job, int64_t b,
                                       int64_t context, int64_t row, int part) {
  ChainTask& t = group.task<ChainTask>();
  ChainWalk walk(group, job, context);
  Judge judge(job, t, context, group.rank);
  bool filling = job.plan.parallel;
  if (!filling) clear_outputs(group, job.p, b);
  __syncthreads();
  if (warp_id() == 0) {
    if (lane_id() == 0) open_sequence(job.p, b, t);
    __syncwarp();
    limit_drafts(job.p, t);
    __syncwarp();
    if (lane_id() == 0) {
      t.ahead = filling && !t.over && !t.greedy && !t.direct && !t.filtered &&
                job.p.rule != Rule::kMatch && 2 * job.row_tile_stats() <= kStatsInShared;
      t.action = Action::kDone;
      if (!filling) {
        judge.begin();
      } else if (!t.over && (row < t.drafts || (row == t.drafts && !t.cut))) {
        judge.take_row(row);
        t.fills = true;
      }
    }
  }
  __syncthreads();
  while (filling || t.action != Action::kDone) {
    // Behind a barrier either buffer will do: whose turn it is need not be kept in a register.
    group.turn = 0;
    if (t.action == Action::kMeasure && t.fills) {
      if (!filling && job.plan.parallel) group.sync();  // nobody reads this slot any more
      walk.fill(filling ? part : 0, filling ? job.plan.splits : 1);
    }
    if (filling) {
      const auto count = static_cast<unsigned>((job.p.gamma + 1) * job.plan.splits);
      if (!last_group(group, job.tickets + b, job.launch, count)) return;
      filling = false;
      clear_outputs(group, job.p, b);
      __syncthreads();
      walk.measure_ahead();
      if (thread_id() == 0) judge.begin();
      __syncthreads();
      continue;
    }
    switch (t.action) {
      case Action::kTouch:
        walk.touch(judge);
        break;
      case Action::kMeasure:
        if (t.fills) group.sync();
        walk.measure();
        break;
      case Action::kEntropy:
      case Action::kDifference:
        walk.difference(t.action == Action::kEntropy);
        break;
      case Action::kDraw:
        walk.draw();
        break;
      case Action::kDone:
        break;
    }
    __syncthreads();
    if (thread_id() == 0) judge.go_on();
    __syncthreads();
  }
  if (group.rank != 0 || thread_id() != 0) return;
  job.p.num_accepted[b] = t.accepted;
  job.p.status[b] = t.status;
}

}  // namespace specdec::cuda
