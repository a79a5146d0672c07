#pragma once
// One sequence of verify_chain, as every block that works on it opens it, and the memory of a call.
#include "cuda/row/residual.cuh"
#include "cuda/row/summary.cuh"
#include "specdec/chain.h"

namespace specdec::cuda {

struct ChainSequence : SequenceState {
  int64_t num_drafts;  // drafts to verify, as `find_drafts` counts them
  int32_t status;
  int32_t status_after_drafts;  // reported if all drafts are accepted
  bool no_bonus;                // no bonus token may follow the last draft

  // Whether target row i is needed: that of a draft, or of the bonus token.
  __device__ bool has_row(int64_t i) const {
    return i < num_drafts || (i == num_drafts && !no_bonus && status == 0);
  }
};

// The sums of rule block over a drafted row: of max(cP - Q, 0) and max(Q - cP, 0).
struct BlockSums {
  double positive, negative;
  bool target_valid, draft_valid;
};

// What rule block records of a draft: the factor of P after the drafts before it, and its log P.
struct BlockDraft {
  double c;
  float logprob;
};

// The drafts of a block that count, and the fault of the row behind them, 0 if there is none.
struct BlockEnd {
  int64_t end;
  int32_t fault;
};

// The arguments of the kernels. Each sequence has gamma+1 target rows and gamma draft rows; only
// those that a call measures have statistics, a summary and a ticket.
struct ChainJob {
  ChainParams p;
  unsigned long long*
      words;              // [B, words_of_sequence()]: tickets of rows, positions, residuals; limit
  RowSummary* summaries;  // [B, rows()]
  Survivor* lists;        // [B, gamma+1, most_listed(vocab)], null without filters
  TileStatsArray tile_stats;  // [B, rows()]
  TileStatsArray sums;        // [B, residuals(), kSums]
  BlockSums* block_sums;      // [B, gamma], rule block, and so the following
  BlockDraft* block_drafts;   // [B, gamma+1]
  BlockEnd* block_ends;       // [B]
  uint64_t launch_id;
  int splits;  // of a row, in the kernel that is launched
  bool measures_targets, measures_drafts;

  // The sums over the warp tiles of a row that a token is drawn from: of the residual, of what the
  // draft exceeds the target by, of the draft beyond the target's vocabulary, of a direct target.
  enum Sum { kPositive, kNegative, kBeyond, kDirect, kSums };

  SPECDEC_HD int64_t targets() const { return measures_targets ? p.gamma + 1 : 0; }
  SPECDEC_HD int64_t rows() const { return targets() + (measures_drafts ? p.gamma : 0); }
  SPECDEC_HD int64_t words_of_sequence() const { return rows() + 2 * p.gamma + 2; }
  SPECDEC_HD int64_t residuals() const { return p.rule == Rule::kBlock ? p.gamma + 1 : 1; }

  __device__ int64_t target_slot(int64_t b, int64_t i) const { return b * rows() + i; }
  __device__ int64_t draft_slot(int64_t b, int64_t i) const { return b * rows() + targets() + i; }
  __device__ Survivor* list(int64_t b, int64_t i) const {
    return lists == nullptr ? nullptr : lists + (b * (p.gamma + 1) + i) * most_listed(p.vocab);
  }
  __device__ TileStats sum(int64_t b, int64_t i, Sum which) const {
    return sums[(b * residuals() + (p.rule == Rule::kBlock ? i : 0)) * kSums + which];
  }

  __device__ unsigned long long* row_ticket(int64_t b, int64_t slot) const {
    return words + b * words_of_sequence() + (slot - b * rows());
  }
  __device__ unsigned long long* position_ticket(int64_t b, int64_t i) const {
    return words + b * words_of_sequence() + rows() + i;
  }
  // Of the blocks that sum a residual.
  __device__ unsigned long long* residual_ticket(int64_t b, int64_t i) const {
    return position_ticket(b, p.gamma + i);
  }
  // No row beyond this one is needed: the draft there was rejected.
  __device__ unsigned long long* limit(int64_t b) const {
    return words + (b + 1) * words_of_sequence() - 1;
  }
};

// Counts the drafts to verify. They end before the first -1 or id out of range, and with an
// end-of-sequence token or the last token that may be emitted. For one warp: each lane looks at one
// draft.
inline __device__ void find_drafts(const ChainParams& p, ChainSequence& s) {
  const int64_t most = most_new_tokens(p, s);
  bool no_bonus = most == 0, outside = false;
  int64_t num_drafts = s.status != 0 || no_bonus ? 0 : s.rows - 1;
  for (int64_t first = 0; first < num_drafts; first += kLanes) {
    const int64_t i = first + lane_id();
    const int64_t x = i < num_drafts ? p.drafted(s.b, i) : 0;
    const bool before = i < num_drafts && (x < 0 || x >= p.id_limit());
    const bool after = i < num_drafts && (i + 1 >= most || is_eos(p, x));
    const unsigned stops = __ballot_sync(kAllLanes, before || after);
    if (stops == 0) continue;
    const int lane = __ffs(static_cast<int>(stops)) - 1;
    const bool in_front = __shfl_sync(kAllLanes, static_cast<int>(before), lane) != 0;
    outside = __shfl_sync(kAllLanes, static_cast<int>(before && x != -1), lane) != 0;
    num_drafts = first + lane + (in_front ? 0 : 1);
    no_bonus = !in_front;
  }
  __syncwarp();
  if (lane_id() != 0) return;
  s.num_drafts = num_drafts;
  s.no_bonus = no_bonus;
  s.status_after_drafts = outside ? kDraftOutOfRange : 0;
}

// Opens sequence b. For the whole block.
inline __device__ void open(const ChainParams& p, int64_t b, ChainSequence& s) {
  if (thread_id() == 0) {
    s.status = open_sequence(p, p.rule == Rule::kGreedy, b, p.gamma + 1, s);
  }
  __syncthreads();
  if (warp_id() == 0) find_drafts(p, s);
  __syncthreads();
}

// Whether draft rows are measured. Those of probabilities, and those that come with what `sample`
// returned, are read at the drafted token alone until that is rejected.
inline __device__ bool measures_draft(const ChainJob& job, const ChainSequence& s, int64_t i) {
  return job.measures_drafts && i < s.num_drafts && s.draft_temperature > 0 && !s.greedy &&
         has_row(job.p.draft, draft_row(job.p, s, i));
}

}  // namespace specdec::cuda
