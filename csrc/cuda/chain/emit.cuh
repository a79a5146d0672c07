#pragma once
// The last launch of verify_chain: a few blocks a sequence decide alike from the summaries of its
// rows, share the scan of the one row that a token is drawn from, and the last of them draws.
#include "cuda/chain/block.cuh"

namespace specdec::cuda {

struct EmitShared : BlockShared {
  ChainSequence sequence;
  Emission emission;
  Residual residual;
  bool scans;
  Arrival arrival;
};

// Whether a token may be drawn from a row that blocks scan, or from a residual. For one thread.
__forceinline__ __device__ bool prepares(const ChainSequence& s, const Emission& e) {
  return e.source == Source::kResidual || (e.source == Source::kTarget && s.direct);
}

// Draws from P. For the whole block.
inline __device__ int64_t draw_target(ThreadBlock& block, const ChainJob& job,
                                      const ChainSequence& s, int64_t i, double u) {
  if (s.direct) return draw_scanned(block, shared_memory<EmitShared>()->residual, false, u);
  const int64_t slot = job.target_slot(s.b, i);
  return draw_measured(block, target_row(job.p, s, i), job.summaries[slot], job.tile_stats[slot],
                       job.list(s.b, i), candidates_of<EmitShared>(), u);
}

// Draws the token of an emission whose sums are complete; -1 if there is none. For the whole block.
inline __device__ int64_t draw(ThreadBlock& block, const ChainJob& job, EmitShared& s) {
  const ChainSequence& q = s.sequence;
  const Residual& r = s.residual;
  const int64_t i = s.emission.accepted;
  const double u = residual_uniform(job.p, q, i);
  int32_t fault = 0;
  if (s.emission.source == Source::kResidual || q.direct) {
    const BlockSums sums = residual_sums(block, r);
    if (!sums.target_valid) {
      if (thread_id() == 0) s.emission.status |= kTargetInvalid;
      return -1;
    }
    if (s.emission.source == Source::kResidual) {
      fault = !r.subtracts || !sums.draft_valid ? kDraftInvalid : 0;
      int64_t token = -1;
      if (fault == 0 && r.only_draft) {
        Candidates& c = candidates_of<EmitShared>();
        load_list(job.list(q.b, i), job.summaries[job.target_slot(q.b, i)].listed, c);
        token = draw_residual_listed(block, r, c, u);
      } else if (fault == 0 && sums.positive > 0) {
        token = draw_scanned(block, r, true, u);
      }
      if (token >= 0) return token;
      if (fault == 0) fault = kEmptyResidual;
    }
  }
  if (thread_id() == 0) s.emission.status |= fault;
  __syncthreads();
  return draw_target(block, job, q, i, u);
}

// Writes the emitted token, the number of accepted drafts and the status. For the whole block.
inline __device__ void emit(ThreadBlock& block, const ChainJob& job, EmitShared& s) {
  const ChainParams& p = job.p;
  const ChainSequence& q = s.sequence;
  const Emission& e = s.emission;
  int64_t token = -1;
  if (e.source == Source::kChoice) {
    token = job.summaries[job.target_slot(q.b, e.accepted)].token;
  } else if (e.source != Source::kNothing) {
    token = draw(block, job, s);
  }
  if (thread_id() != 0) return;
  double logprob = 0;
  if (token >= 0 && !q.greedy) {
    // Only a direct row needs no statistics.
    const RowStats& stats =
        q.direct ? s.residual.stats : job.summaries[job.target_slot(q.b, e.accepted)].stats;
    logprob = stats.logprob(at(target_row(p, q, e.accepted), token));
  }
  write_token(p, q.b, e.accepted, token, logprob);
  p.num_accepted[q.b] = static_cast<int32_t>(e.accepted);
  p.status[q.b] = e.status;
}

// Decides, and writes all outputs but those of the emitted token. For one warp.
__forceinline__ __device__ void decide(const ChainJob& job, EmitShared& s, bool writes) {
  const ChainParams& p = job.p;
  const ChainSequence& q = s.sequence;
  const bool block_rule = p.rule == Rule::kBlock && !q.greedy;
  if (block_rule) {
    if (lane_id() == 0) s.emission = decide_block(job, q, writes);
  } else {
    const int64_t accepted = count_accepted(job, q, writes);
    if (lane_id() == 0) s.emission = emission_of(job, q, accepted);
  }
  __syncwarp();
  if (!block_rule || !writes) return;
  const int64_t accepted = s.emission.accepted;
  for (int64_t i = lane_id(); i < accepted; i += kLanes) {
    const float logprob = job.block_drafts[q.b * (p.gamma + 1) + i].logprob;
    write_token(p, q.b, i, p.drafted(q.b, i), static_cast<double>(logprob));
  }
}

// Fills the outputs as if no token were emitted and no draft tested. For the whole block.
inline __device__ void clear_outputs(const ChainParams& p, int64_t b) {
  for (int64_t i = thread_id(); i <= p.gamma; i += kThreads) {
    write_token(p, b, i, -1, 0);
    write_accept_prob(p, b, i, NAN);
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, kDecideBlocks)
    decide_kernel(const __grid_constant__ ChainJob job) {
  auto& s = *shared_memory<EmitShared>();
  ThreadBlock block(s);
  const ChainParams& p = job.p;
  const int64_t b = blockIdx.x / static_cast<unsigned>(job.splits);
  const auto split = static_cast<int>(blockIdx.x % static_cast<unsigned>(job.splits));
  const int step = job.splits * kWarps;
  const ChainSequence& q = s.sequence;
  unsigned long long* const ticket = job.residual_ticket(b, p.gamma);
  if (split == 0 && thread_id() == 0) *job.limit(b) = 0;
  open(p, b, s.sequence);
  if (split == 0) clear_outputs(p, b);
  if (warp_id() == 0) {
    decide(job, s, split == 0);
    if (lane_id() == 0) {
      const Emission& e = s.emission;
      const bool prepared = prepares(q, e);
      if (prepared) {
        prepare(job, q, e.accepted, e.c, e.source == Source::kResidual, step, s.residual);
      }
      // Those of rule block were summed before, unless few tokens told their sums.
      const bool summed =
          prepared && s.residual.both && e.source == Source::kResidual && !s.residual.few();
      s.scans = prepared && !summed && needs_scan(s.residual);
      if (s.scans) begin_arrivals(ticket, job.launch_id, job.splits);
    }
  }
  __syncthreads();
  if (s.scans) {
    scan(s.residual, split * kWarps + warp_id(), step);
    if (!arrive(s.arrival, ticket, job.splits, false).last) return;
  } else if (split != 0) {
    return;
  }
  emit(block, job, s);
}

}  // namespace specdec::cuda
