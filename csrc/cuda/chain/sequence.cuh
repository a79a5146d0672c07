#pragma once
// The state of one sequence while a group verifies it. Every block keeps it in its own shared
// memory.
#include "cuda/chain/residual.cuh"
#include "specdec/chain.h"

namespace specdec::cuda {

// What all threads of a group do together between two decisions.
enum class Action : int32_t { kCheckEntries, kMeasure, kEntropy, kResidual, kDraw, kDone };

// What the action was for.
enum class State : int32_t {
  kInOrder,       // the statistics of the next row
  kRejected,      // those of a rejected row that was read at one entry only
  kBlockRows,     // rule block: the statistics of each drafted row
  kBlockFromEnd,  // rule block: the residual of a row, from the last one on
  kBlockFollow    // rule block: the row after the accepted drafts
};

// What rule block keeps of each drafted row.
struct ChainRecord {
  RowStats stats;
  DraftDistribution draft;
  double carried;  // c_i
  double logprob;
};

struct ChainTask : SequenceState {
  int64_t drafts;  // how many can be accepted
  int32_t status, accepted;
  int32_t after_drafts;    // status of the position after them
  bool ends;               // no token follows the last of them
  bool over;               // there is nothing to verify
  bool all_measured;       // row-parallel: the statistics of all rows are known before any decision
  int64_t accepted_ahead;  // leading drafts that were accepted by their entries alone
  // Rule block.
  int64_t end, tau;
  int32_t fault;
  // The current row.
  State state;
  Action action;
  int64_t i, x;    // x: drafted token, or -1
  bool one_entry;  // read at the drafted token alone
  bool has_draft;  // Q is needed
  bool prefilled;  // the tile statistics are there already
  bool fills;      // the action computes them
  bool residual;   // the draw is from the residual, else from P
  bool valid;      // the draft row is, as far as the residual has read it
  int turn;        // which of two sets of tile statistics a row uses
  bool used;       // it was filled for this row
  RowView row;
  TileStats tile_stats, draft_tile_stats;
  RowStats stats;
  DraftDistribution draft;
  double c;                   // factor of P in the residual
  double positive, negative;  // sums of max(cP - lQ, 0) and max(lQ - cP, 0)
  double entropy;
  int64_t token;  // the target's choice, or what was drawn
};

// The arguments of the kernel. A context is one set of scratch memory: that of a group in the
// row-lazy schedule, that of a sequence in the row-parallel one.
struct ChainJob {
  ChainParams p;
  CudaPlan plan;
  TileStatsArray tile_stats_array;
  ChainRecord* records;         // [contexts, group_size, gamma+1], rule block
  unsigned long long* tickets;  // [B], row-parallel
  uint64_t launch;

  // A context has tile statistics for target rows, for draft rows, then three for a residual.
  SPECDEC_HD int64_t row_tile_stats() const { return plan.parallel ? p.gamma + 1 : 2; }
  SPECDEC_HD int64_t context_tile_stats() const { return 2 * row_tile_stats() + 3; }
};

// Q of draft i at the drafted token x.
inline __device__ void open_draft(const ChainParams& p, const ChainTask& t, int64_t i, int64_t x,
                                  DraftDistribution& d) {
  open_draft(p.draft, t.b, draft_row(p, t, i), draft_statistic(p, t, i), x, t.q_temperature, d);
}

// For one thread.
inline __device__ void open_sequence(const ChainParams& p, int64_t b, ChainTask& t) {
  t.drafts = t.fault = t.accepted = 0;
  t.status = open_sequence(p, p.rule == Rule::kGreedy, b, p.gamma + 1, t);
  t.over = t.status != 0;
  t.ends = most_new_tokens(p, t) == 0;
}

// Drafts end at the first -1, and nothing follows an end-of-sequence token or the last token that
// may be emitted. For one warp, whose lanes look at one draft each.
inline __device__ void find_drafts(const ChainParams& p, ChainTask& t) {
  const int64_t most = most_new_tokens(p, t);
  int64_t drafts = t.over || t.ends ? 0 : t.rows - 1;
  bool ends = t.ends, outside = false;
  for (int64_t first = 0; first < drafts; first += kLanes) {
    const int64_t i = first + lane_id();
    const int64_t x = i < drafts ? p.drafted(t.b, i) : 0;
    const bool before = i < drafts && (x < 0 || x >= p.id_limit());
    const bool after = i < drafts && (i + 1 >= most || is_eos(p, x));
    const unsigned stops = __ballot_sync(kAllLanes, before || after);
    if (stops == 0) continue;
    const int lane = __ffs(static_cast<int>(stops)) - 1;
    const bool in_front = __shfl_sync(kAllLanes, static_cast<int>(before), lane) != 0;
    outside = __shfl_sync(kAllLanes, static_cast<int>(before && x != -1), lane) != 0;
    drafts = first + lane + (in_front ? 0 : 1);
    ends = !in_front;
  }
  __syncwarp();
  if (lane_id() != 0) return;
  t.drafts = drafts;
  t.ends = ends;
  t.after_drafts = outside ? kDraftOutOfRange : 0;
}

// Fills the outputs with what they hold where no token is emitted and no draft is decided on.
inline __device__ void clear_outputs(const BlockGroup& group, const ChainParams& p, int64_t b) {
  if (group.rank != 0) return;
  for (int64_t i = thread_id(); i <= p.gamma; i += kThreads) {
    const int64_t at = b * (p.gamma + 1) + i;
    put_id(p.tokens, p.ids_are_int64, at, -1);
    if (p.logprobs != nullptr) p.logprobs[at] = 0;
    if (p.accept_probs != nullptr && i < p.gamma) p.accept_probs[b * p.gamma + i] = NAN;
  }
}

}  // namespace specdec::cuda
