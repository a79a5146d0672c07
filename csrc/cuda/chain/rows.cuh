#pragma once
// The first launch of verify_chain: blocks measure the target rows and draft rows of all sequences,
// those of the first position first. The last block of a row makes its summary; the last one of a
// position tests the draft, and blocks of rows behind a rejection return without reading. That
// depends on time, but no decision does: what is read of rows behind the first rejection changes
// nothing.
#include "cuda/chain/decide.cuh"
#include "cuda/row/unit.cuh"

namespace specdec::cuda {

struct RowsShared : UnitShared<ChainSequence> {
  bool skips;
};

// Opens the row of this block.
__forceinline__ __device__ void open_unit(const ChainJob& job, RowsShared& s) {
  const ChainParams& p = job.p;
  const RowUnit unit =
      own_unit(p.batch, p.gamma + 1, job.measures_targets, job.measures_drafts, job.splits);
  open(p, unit.b, s.sequence);
  if (thread_id() != 0) return;
  const ChainSequence& q = s.sequence;
  const int64_t i = unit.i, slot = unit.is_draft ? job.draft_slot(q.b, i) : job.target_slot(q.b, i);
  s.unit = unit;
  s.slot = slot;
  s.exists = unit.is_draft ? measures_draft(job, q, i) : !q.direct && q.has_row(i);
  if (!s.exists) return;
  begin_arrivals(job.row_ticket(q.b, slot), job.launch_id, job.splits);
  s.skips = limit_of(job.limit(q.b), job.launch_id) < i;
  open_unit(p, q, unit, unit.is_draft ? draft_row(p, q, i) : i, i, job.tile_stats[slot],
            p.rule == Rule::kMatch ? Want::kGumbel : Want::kMass, job.list(q.b, i), s.task);
}

// The entry of the drafted token, 0 if there is none.
inline __device__ float entry_of_draft(const ChainJob& job, const RowsShared& s) {
  const ChainParams& p = job.p;
  if (s.unit.i >= s.sequence.num_drafts) return 0;
  const int64_t x = p.drafted(s.sequence.b, s.unit.i);
  const int64_t column = s.unit.is_draft ? column_of(p.draft.columns, p.draft.vocab, x)
                         : x < p.vocab   ? x
                                         : -1;
  return column < 0 ? 0 : at(s.task.row, column);
}

// Makes the summary of the row, whose tile statistics are complete. For the whole block.
__forceinline__ __device__ void finish_row(ThreadBlock& block, const ChainJob& job, RowsShared& s) {
  const ChainParams& p = job.p;
  const ChainSequence& q = s.sequence;
  const RowTask& t = s.task;
  RowSummary& out = s.summary;
  summarise(block, t, candidates_of<RowsShared>(), out);
  if (thread_id() == 0) out.entry = entry_of_draft(job, s);
  __syncthreads();
  if (!s.unit.is_draft && s.unit.i < q.num_drafts && out.stats.valid) {
    double found = 0;
    if (p.rule == Rule::kTypical && !q.greedy) {
      if (typical_needs_entropy(drafted_probability(out), p.typical_epsilon)) {
        found = entropy(block, t, out.stats);
      }
    } else if (p.rule == Rule::kTopBeta && near_top(p, q, out) && out.entry < out.stats.max) {
      found = static_cast<double>(count_above(block, t, out.entry));
    }
    if (thread_id() == 0) out.asked = found;
  }
  if (thread_id() == 0) job.summaries[s.slot] = out;
}

// Tests the draft of the position once its rows are there. Rule block looks ahead, so that it needs
// all rows. For one thread.
inline SPECDEC_NOINLINE __device__ void finish_position(const ChainJob& job, const ChainSequence& q,
                                                        int64_t i, bool skipped) {
  if (job.p.rule == Rule::kBlock || i >= q.num_drafts) return;
  const unsigned rows = (q.direct ? 0 : 1) + (measures_draft(job, q, i) ? 1 : 0);
  unsigned long long* const ticket = job.position_ticket(q.b, i);
  begin_arrivals(ticket, job.launch_id, rows);
  const Arrival arrival = arrive(ticket, rows, skipped);
  if (!arrival.last || arrival.skipped) return;
  if (!test_draft(job, q, i).accepted) lower_limit(job.limit(q.b), job.launch_id, i);
}

__global__ void __launch_bounds__(kThreads, kBlocksWithFewRegisters)
    rows_kernel(const __grid_constant__ ChainJob job) {
  auto& s = *shared_memory<RowsShared>();
  ThreadBlock block(s);
  open_unit(job, s);
  __syncthreads();
  if (!s.exists) return;
  if (!s.skips) fill_tile_stats(s.task);
  const Arrival arrival =
      arrive(s.arrival, job.row_ticket(s.sequence.b, s.slot), job.splits, s.skips);
  if (!arrival.last) return;
  if (!arrival.skipped) finish_row(block, job, s);
  if (thread_id() == 0) finish_position(job, s.sequence, s.unit.i, arrival.skipped);
}

}  // namespace specdec::cuda
