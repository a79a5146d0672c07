#pragma once
// What the blocks of a group know of the sequence they verify, each in its own shared memory.
#include "cuda/chain/residual.cuh"
#include "specdec/chain.h"

namespace specdec::cuda {

// What all threads of a group do together. Between two actions one thread of each block judges; all
// blocks come to the same verdict.
enum class Action : int32_t { kTouch, kMeasure, kEntropy, kDifference, kDraw, kDone };

// What the judge waits for.
enum class State : int32_t {
  kWalk,        // the law of the next row
  kRejected,    // the law of a row that was only touched, or that was measured before
  kBlockRows,   // rule block: the laws of all rows
  kBlockBack,   // the difference at a row, from the end on
  kBlockFollow  // the row after the block
};

// One a drafted row, of rule block.
struct ChainRecord {
  RowStats stats;
  DraftDistribution draft;
  double carried;  // c
  double logprob;
};

struct ChainTask : SequenceState {
  // Of the sequence.
  int64_t drafts;  // how many are judged
  int32_t status, accepted;
  int32_t missing;  // status of the position after the drafts
  bool cut;         // nothing follows the last draft
  bool over;
  bool ahead;       // row-parallel: all laws are found before the first verdict
  int64_t touched;  // leading drafts that stand without a look at anything but their entries
  // Of rule block.
  int64_t end, tau;
  int32_t fault;
  // Of the row at hand.
  State state;
  Action action;
  int64_t i, x;    // x: drafted token, -1: none
  bool gather;     // judged at the drafted token alone
  bool has_draft;  // its draft law is asked for
  bool prefilled;  // the slots are filled
  bool fills;      // the action fills them
  bool residual;   // what a draw is from
  bool valid;      // of the draft, in the difference
  int turn;        // which of two slots a row takes
  bool used;       // it was filled since it was taken
  RowView row;
  TileStats tile_stats, draft_tile_stats;
  RowStats stats;
  DraftDistribution draft;
  double c;           // factor of P in the difference
  double more, less;  // sums of max(cP - lQ, 0) and max(lQ - cP, 0)
  double entropy;
  int64_t token;  // what the target says, or what was drawn
};

struct ChainJob {
  ChainParams p;
  CudaPlan plan;
  TileStatsArray tile_stats_array;
  ChainRecord* records;         // [contexts, group, gamma+1], rule block
  unsigned long long* tickets;  // [B], row-parallel
  uint64_t launch;

  // TileStatsArray of one context: target rows, their drafts, then three for a difference.
  SPECDEC_HD int64_t row_tile_stats() const { return plan.parallel ? p.gamma + 1 : 2; }
  SPECDEC_HD int64_t context_tile_stats() const { return 2 * row_tile_stats() + 3; }
};

// Q of draft i, at the drafted token x; see draft.cuh.
inline __device__ void open_draft(const ChainParams& p, const ChainTask& t, int64_t i, int64_t x,
                                  DraftDistribution& d) {
  open_draft(p.draft, t.b, draft_row(p, t, i), draft_statistic(p, t, i), x, t.q_temperature, d);
}

// Parameters and rows of sequence b. For one thread.
inline __device__ void open_sequence(const ChainParams& p, int64_t b, ChainTask& t) {
  t.drafts = t.fault = t.accepted = 0;
  t.status = open_sequence(p, p.rule == Rule::kGreedy, b, p.gamma + 1, t);
  t.over = t.status != 0;
  t.cut = most_new_tokens(p, t) == 0;
}

// How many drafts are judged, and whether nothing follows when all of them stand: nothing follows
// an end-of-sequence token or the last token that may be emitted. For one warp, a lane a draft.
inline __device__ void limit_drafts(const ChainParams& p, ChainTask& t) {
  const int64_t most = most_new_tokens(p, t);
  int64_t drafts = t.over || t.cut ? 0 : t.rows - 1;
  bool cut = t.cut, outside = false;
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
    cut = !in_front;
  }
  __syncwarp();
  if (lane_id() != 0) return;
  t.drafts = drafts;
  t.cut = cut;
  t.missing = outside ? kDraftOutOfRange : 0;
}

// Nothing emitted, nothing judged.
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
