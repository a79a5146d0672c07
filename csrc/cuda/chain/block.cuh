#pragma once
// Rule block (Sun et al. 2024): the first tau drafts are accepted, where tau is the largest with
// u < h_tau. See docs/rules.md#block. Between the launches of `rows` and `decide` one more sums the
// residual of every drafted row.
#include "cuda/chain/residual.cuh"
#include "cuda/ticket.cuh"

namespace specdec::cuda {

// The factors c_0 = 1 .. c_end of the drafts before the first whose rows are not valid, which ends
// the block as if nothing had been drafted from there on. `factor` becomes c_wanted. Writes the
// records of the sequence if `writes`. For one warp; in every lane.
inline __device__ BlockEnd open_block(const ChainJob& job, const ChainSequence& s, int64_t wanted,
                                      bool writes, double& factor) {
  const ChainParams& p = job.p;
  BlockDraft* const drafts = job.block_drafts + s.b * (p.gamma + 1);
  BlockEnd out = {s.num_drafts, 0};
  double c = 1;
  factor = c;
  if (writes && lane_id() == 0) drafts[0].c = c;
#pragma unroll 1
  for (int64_t first = 0; first < out.end; first += kLanes) {
    const int64_t i = first + lane_id();
    int32_t fault = 0;
    double ratio = 0, logprob = -INFINITY;
    if (i < s.num_drafts) {
      const int64_t x = p.drafted(s.b, i);
      const RowSummary target = target_of(job, s, i);
      DraftDistribution draft;
      open_draft(job, s, i, x, draft);
      fault = !target.stats.valid ? kTargetInvalid : draft.invalid_at_token ? kDraftInvalid : 0;
      if (fault == 0 && x < p.vocab) {
        logprob = target.stats.logprob(target.entry);
        ratio = ratio_of_draft(s.direct, target.entry, logprob, draft);
      }
      if (writes) drafts[i].logprob = static_cast<float>(logprob);
    }
    const unsigned faults = __ballot_sync(kAllLanes, fault != 0);
    if (faults != 0) {
      const int lane = __ffs(static_cast<int>(faults)) - 1;
      out = {first + lane, __shfl_sync(kAllLanes, fault, lane)};
    }
#pragma unroll 1
    for (int step = 0; step < kLanes && first + step < out.end; ++step) {
      c = next_p_scale(c, __shfl_sync(kAllLanes, ratio, step));
      if (first + step + 1 == wanted) factor = c;
      if (writes && lane_id() == 0) drafts[first + step + 1].c = c;
    }
  }
  if (writes && lane_id() == 0) job.block_ends[s.b] = out;
  return out;
}

// Looks for tau from the end. For one thread.
inline __device__ Emission decide_block(const ChainJob& job, const ChainSequence& s, bool writes) {
  const ChainParams& p = job.p;
  const BlockDraft* const drafts = job.block_drafts + s.b * (p.gamma + 1);
  BlockEnd b = job.block_ends[s.b];
  int64_t tau = b.end;
  for (; tau > 0; --tau) {
    double h = drafts[tau].c;
    if (tau < b.end) {
      const BlockSums& sums = job.block_sums[s.b * p.gamma + tau];
      const int32_t fault = !sums.target_valid  ? kTargetInvalid
                            : !sums.draft_valid ? kDraftInvalid
                                                : 0;
      if (fault != 0) {
        b = {tau, fault};
      } else {
        h = block_accept_prob(h, sums.positive, sums.negative);
      }
    }
    if (writes) write_accept_prob(p, s.b, tau - 1, h);
    if (block_accept_uniform(p, s, tau - 1) < h) break;
  }
  Emission e = {tau, Source::kNothing, s.status, drafts[tau].c};
  if (tau < b.end) {
    e.source = Source::kResidual;
  } else if (s.status == 0 && (b.fault != 0 || !s.no_bonus)) {
    const bool measured = !s.direct && b.fault == 0;
    const bool valid =
        measured ? job.summaries[job.target_slot(s.b, tau)].stats.valid : b.fault != kTargetInvalid;
    if (b.fault != kTargetInvalid) e.status |= b.fault != 0 ? b.fault : s.status_after_drafts;
    if (!valid) e.status |= target_fault(p, s, tau);
    if (valid) e.source = Source::kTarget;
  }
  return e;
}

// What the blocks of one drafted row need, in shared memory.
struct BlockRowShared : BlockShared {
  ChainSequence sequence;
  Residual residual;
  BlockEnd end;
  double c;
  Arrival arrival;
};

// The launch between those of rows and decide.
__global__ void __launch_bounds__(kThreads, kDecideBlocks)
    block_kernel(const __grid_constant__ ChainJob job) {
  auto& s = *shared_memory<BlockRowShared>();
  ThreadBlock block(s);
  const ChainParams& p = job.p;
  const unsigned unit = blockIdx.x / static_cast<unsigned>(job.splits);
  const auto split = static_cast<int>(blockIdx.x % static_cast<unsigned>(job.splits));
  const int64_t i = unit / static_cast<unsigned>(p.batch);
  open(p, unit % static_cast<unsigned>(p.batch), s.sequence);
  const ChainSequence& q = s.sequence;
  if (q.greedy) return;
  if (warp_id() == 0) {
    double c;
    const BlockEnd end = open_block(job, q, i, i == 0 && split == 0, c);
    if (lane_id() == 0) {
      s.end = end;
      if (i < end.end) {
        prepare(job, q, i, c, true, job.splits * kWarps, s.residual);
        if (!s.residual.few()) {
          begin_arrivals(job.residual_ticket(q.b, i), job.launch_id, job.splits);
        }
      }
    }
  }
  __syncthreads();
  if (i >= s.end.end) return;
  BlockSums& out = job.block_sums[q.b * p.gamma + i];
  if (s.residual.few()) {
    // P is read at the drafted tokens alone.
    if (split != 0) return;
    const BlockSums sums = residual_sums_of_few(block, s.residual);
    if (thread_id() == 0) out = sums;
    return;
  }
  scan(s.residual, split * kWarps + warp_id(), job.splits * kWarps);
  if (!arrive(s.arrival, job.residual_ticket(q.b, i), job.splits, false).last) return;
  const BlockSums sums = residual_sums(block, s.residual);
  if (thread_id() == 0) out = sums;
}

}  // namespace specdec::cuda
