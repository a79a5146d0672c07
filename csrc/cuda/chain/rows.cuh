#pragma once
// The first launch of verify_chain: blocks measure the target rows and draft rows of all sequences,
// those of the first position first. The last block of a row makes its summary; the last one of a
// position tests the draft, and blocks of rows behind a rejection return without reading. That
// depends on time, but no decision does: rows behind the first rejection are never looked at.
#include "cuda/chain/decide.cuh"
#include "cuda/ticket.cuh"

namespace specdec::cuda {

// The sum over the row of what `terms` makes of the values of a warp tile, in the tiles that reach
// `low`. Terms are integers, so that no order changes the sum.
template <class Terms>
inline __device__ int64_t sum_of_row(BlockGroup& block, const RowTask& t, float low,
                                     const Terms& terms) {
  int64_t mine = 0;
  for_warp_tiles(t.tile_stats, t.row.warp_tiles(), low, [&](int warp_tile) {
    const TileValues tile = call_read_warp_tile<AnyRead>(t.row, warp_tile);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) mine += terms(tile.values[j]);
  });
  return block.sum(mine);
}

// The entropy of P: log sum exp plus the mean of (max - l) / T.
inline __device__ double entropy(BlockGroup& block, const RowTask& t, const RowStats& stats) {
  const int bits = 62 - ceil_log2(t.row.vocab);
  const auto unit = static_cast<float>(int64_t{1} << (bits < 48 ? bits : 48));
  const WeightParams weights = {stats.max, rate_of(stats.inv_t), stats.threshold};
  const int64_t sum = sum_of_row(block, t, stats.threshold, [&](float l) {
    const float w = weights.weight(l);
    // At most .54.
    return w > 0 ? static_cast<int64_t>(w * ((stats.max - l) * weights.rate) * unit) : 0;
  });
  return stats.log_sum + M_LN2 * (static_cast<double>(sum) / unit) * exp_of(-stats.log_sum);
}

inline __device__ int64_t count_above(BlockGroup& block, const RowTask& t, float value) {
  return sum_of_row(block, t, value, [&](float l) { return int64_t{l > value}; });
}

struct RowsShared : BlockShared {
  ChainSequence sequence;
  RowTask task;
  RowSummary summary;
  int64_t i;
  bool is_draft, exists, skips, last;
};
// With filters the candidates follow.
struct FilteredRowsShared : RowsShared {
  Candidates candidates;
};

// The row of this block, from its place in the grid: rows of all sequences, in order of position,
// then the splits of each. The last position has no drafts.
__forceinline__ __device__ void open_own_row(const ChainJob& job, RowsShared& s) {
  const ChainParams& p = job.p;
  const unsigned kinds = (job.measures_targets ? 1 : 0) + (job.measures_drafts ? 1 : 0);
  const unsigned unit = blockIdx.x / static_cast<unsigned>(job.splits);
  const auto batch = static_cast<unsigned>(p.batch);
  const unsigned of_drafts = static_cast<unsigned>(p.gamma) * batch * kinds;
  const bool bonus = unit >= of_drafts;
  const unsigned in_order = bonus ? unit - of_drafts : unit / kinds;
  const int64_t i = bonus ? p.gamma : in_order / batch;
  open(p, in_order % batch, s.sequence);
  if (thread_id() != 0) return;
  const ChainSequence& q = s.sequence;
  s.i = i;
  s.is_draft = !bonus && (!job.measures_targets || unit % kinds == 1);
  s.exists = s.is_draft ? measures_draft(job, q, i) : !q.direct && q.has_row(i);
  if (!s.exists) return;
  const int64_t slot = s.is_draft ? job.draft_slot(q.b, i) : job.target_slot(q.b, i);
  begin_arrivals(job.row_ticket(q.b, slot), job.launch_id, job.splits);
  s.skips = limit_of(job.limit(q.b), job.launch_id) < i;
  const auto split = static_cast<int>(blockIdx.x % static_cast<unsigned>(job.splits));
  const GumbelNoise noise = {q.seed, q.position + static_cast<uint64_t>(i), kSharedStream};
  if (s.is_draft) {
    return open_row(row_of(p.draft, q.b, draft_row(p, q, i), Read::kLogits), job.tile_stats[slot],
                    {q.draft_temperature, 0, 1, 0}, Want::kMass, false, noise, split, job.splits,
                    s.task);
  }
  open_row(target_row(p, q, i), job.tile_stats[slot], q.params,
           p.rule == Rule::kMatch ? Want::kGumbel : Want::kMass, q.filtered, noise, split,
           job.splits, s.task);
  s.task.list = job.list(q.b, i);
}

// The entry of the drafted token, 0 if there is none.
inline __device__ float entry_of_draft(const ChainJob& job, const RowsShared& s) {
  const ChainParams& p = job.p;
  if (s.i >= s.sequence.num_drafts) return 0;
  const int64_t x = p.drafted(s.sequence.b, s.i);
  const int64_t column = s.is_draft    ? column_of(p.draft.columns, p.draft.vocab, x)
                         : x < p.vocab ? x
                                       : -1;
  return column < 0 ? 0 : at(s.task.row, column);
}

// Makes the summary of the row, whose tile statistics are complete. For the whole block.
__forceinline__ __device__ void finish_row(BlockGroup& block, const ChainJob& job, RowsShared& s) {
  const ChainParams& p = job.p;
  const ChainSequence& q = s.sequence;
  const RowTask& t = s.task;
  RowSummary& out = s.summary;
  summarise(block, t, &shared_memory<FilteredRowsShared>()->candidates, out);
  if (thread_id() == 0) out.entry = entry_of_draft(job, s);
  __syncthreads();
  if (!s.is_draft && s.i < q.num_drafts && out.stats.valid) {
    double found = 0;
    if (p.rule == Rule::kTypical && !q.greedy) {
      if (typical_needs_entropy(drafted_probability(out), p.typical_epsilon)) {
        found = entropy(block, t, out.stats);
      }
    } else if (p.rule == Rule::kTopBeta && near_top(p, q, out) && out.entry < out.stats.max) {
      found = static_cast<double>(count_above(block, t, out.entry));
    }
    if (thread_id() == 0) out.found = found;
  }
  if (thread_id() == 0) {
    job.summaries[s.is_draft ? job.draft_slot(q.b, s.i) : job.target_slot(q.b, s.i)] = out;
  }
}

// Tests the draft of the position once its rows are there. Rule block looks ahead, so that it needs
// all rows. For one thread.
__forceinline__ __device__ void finish_position(const ChainJob& job, const ChainSequence& q,
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
  BlockGroup block = {&s, 0};
  open_own_row(job, s);
  __syncthreads();
  if (!s.exists) return;
  const ChainSequence& q = s.sequence;
  if (!s.skips) fill_tile_stats<AnyRead>(block, s.task);
  __syncthreads();
  if (thread_id() == 0) {
    const int64_t slot = s.is_draft ? job.draft_slot(q.b, s.i) : job.target_slot(q.b, s.i);
    const Arrival arrival = arrive(job.row_ticket(q.b, slot), job.splits, s.skips);
    s.last = arrival.last;
    s.skips = arrival.skipped;
  }
  __syncthreads();
  if (!s.last) return;
  if (!s.skips) finish_row(block, job, s);
  if (thread_id() == 0) finish_position(job, q, s.i, s.skips);
}

}  // namespace specdec::cuda
