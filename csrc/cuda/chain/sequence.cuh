#pragma once
// The state of one sequence while a group verifies it. Every block keeps it in its own shared
// memory.
#include "cuda/row/fill.cuh"
#include "cuda/row/residual.cuh"
#include "specdec/chain.h"

namespace specdec::cuda {

// The work of all threads of a group between two decisions.
enum class Action : int32_t {
  kTestDrafts,  // tests all drafts by single entries
  kMeasureAll,  // computes the statistics of all rows, and tests all drafts
  kMeasure,     // those of the current row and its draft
  kEntropy,     // sums over the row
  kCount,       // counts the tokens of the row that are likelier than the drafted one
  kResidual,    // sums over the row, and chooses the warp tile to draw from
  kChoose,      // chooses the warp tile to draw from in P
  kDraw,        // draws from that warp tile
  kDone
};

// The step of the decision that the action serves.
enum class State : int32_t {
  kBegin,
  kInOrder,    // decides on the next draft
  kRejected,   // has rejected a draft of a direct row, and measures the whole row to draw from it
  kBlockRows,  // rule block: measures each drafted row
  kBlockFromEnd,  // rule block: sums the residual of a row, from the last row on
  kBlockFollow    // rule block: emits the token after the accepted drafts
};

// What is measured of a target row or of a draft row.
struct MeasuredRow {
  RowStats stats;
  float entry;    // of the drafted token, 0 if it has none
  int64_t token;  // the target's choice, or -1
};
enum Which { kTarget, kDraft };

// By itself, because a compiler takes the quotient of the two sizes for a count of bins, and warns.
constexpr size_t kBytesForRows = sizeof(Shared::bins);
constexpr int64_t kMostMeasuredRows = kBytesForRows / sizeof(MeasuredRow);

// One drafted row, as rule block records it.
struct ChainRecord {
  RowStats stats;
  DraftDistribution draft;
  double p_scale;  // c_i
  double logprob;
};

struct ChainTask : SequenceState {
  int64_t first_drafted[kLanes];  // the first drafted tokens, as the caller gave them
  int64_t num_drafts;             // drafts to verify, as `find_drafts` counts them
  int32_t status, accepted;
  int32_t status_after_drafts;  // reported if all drafts are accepted
  bool no_bonus;                // no bonus token may follow the last draft
  bool nothing_to_verify;
  bool all_measured;       // row-parallel: the statistics of all rows are known before any decision
  int64_t accepted_ahead;  // leading drafts that were accepted side by side
  // Rule block.
  int64_t end, tau;
  int32_t block_fault;
  int64_t context;  // see ChainJob
  unsigned rank;    // this block's place in the group
  bool writes;      // this block writes the outputs
  // Row-parallel: whether this group still computes the tile statistics of its own row, or of its
  // split of it.
  bool filling;
  int64_t own_row;
  int own_split;
  // The row to open next, or -1; `whole`: to draw from it, without its draft.
  int64_t next_row;
  bool next_whole;
  // The current row.
  State state;
  Action action;
  int64_t i, x;             // x: drafted token, or -1
  float entry;              // of x in the target row, 0 if it has none
  bool has_entry;           // `entry` was read before the decision
  bool reads_one_entry;     // read at the drafted token alone
  bool has_draft;           // Q is needed
  bool prefilled;           // the tile statistics are there already
  bool fills;               // kMeasure computes them
  RowFill row_fills[2];     // what it then computes: those of the target row and of the draft row
  MeasuredRow measured[2];  // what it found, unless all rows were measured at once
  bool residual;            // kDraw draws from the residual, else from P
  int64_t chosen_tile;      // the warp tile to draw from
  int64_t chosen_rest;      // the mass in it before the point drawn, see WarpTileMasses::choose
  bool valid;               // the draft row is valid, as far as kResidual has read it
  int stats_buffer;         // which of two sets of tile statistics a row uses
  bool stats_filled;        // that set was filled for this row
  RowView row;
  TileStats tile_stats, draft_tile_stats;
  RowStats stats;
  DraftDistribution draft;
  double c;  // factor of P in the residual
  ScaledTarget scaled_target;
  ResidualRows residual_rows;
  bool residual_loops;        // loops over whole warp tiles serve these rows
  double sums[4];             // what kEntropy or kResidual added up, see ChainResidual
  double positive, negative;  // sums of max(cP - lQ, 0) and max(lQ - cP, 0)
  double found;               // the entropy, or the number of likelier tokens
  double p_x;                 // P of the drafted token under rule typical
  int64_t token;              // the target's choice, or the token drawn

  // Whether the sums of rule block need P at the draft's listed tokens alone. Then no tile sums are
  // kept to draw from.
  __device__ bool sums_residual_of_few() const { return draft.lists_tokens() && !direct; }
};

// The arguments of the kernel. A context is one set of scratch memory: that of a group in the
// row-lazy schedule, that of a sequence in the row-parallel one.
struct ChainJob {
  ChainParams p;
  CudaPlan plan;
  TileStatsArray tile_stats_array;
  ChainRecord* records;         // [contexts, group_size, gamma+1], rule block
  unsigned long long* tickets;  // [B], row-parallel
  uint64_t launch_id;

  // A context has tile statistics for target rows, for draft rows, then three for a residual.
  SPECDEC_HD int64_t row_tile_stats() const { return plan.parallel ? p.gamma + 1 : 2; }
  SPECDEC_HD int64_t context_tile_stats() const { return 2 * row_tile_stats() + 3; }
};

// Drafted token i.
inline __device__ int64_t drafted_token(const ChainParams& p, const ChainTask& t, int64_t i) {
  return i < kLanes ? t.first_drafted[i] : p.drafted(t.b, i);
}

// For one thread.
inline __device__ void open_sequence(const ChainParams& p, int64_t b, ChainTask& t) {
  t.num_drafts = t.block_fault = t.accepted = 0;
  t.status = open_sequence(p, p.rule == Rule::kGreedy, b, p.gamma + 1, t);
  t.nothing_to_verify = t.status != 0;
  t.no_bonus = most_new_tokens(p, t) == 0;
}

// Counts the drafts to verify. They end before the first -1 or id out of range, and with an
// end-of-sequence token or the last token that may be emitted. For one warp: each lane looks at one
// draft.
inline __device__ void find_drafts(const ChainParams& p, ChainTask& t) {
  const int64_t most = most_new_tokens(p, t);
  int64_t num_drafts = t.nothing_to_verify || t.no_bonus ? 0 : t.rows - 1;
  bool no_bonus = t.no_bonus, outside = false;
  for (int64_t first = 0; first < num_drafts; first += kLanes) {
    const int64_t i = first + lane_id();
    const int64_t x = i < num_drafts ? drafted_token(p, t, i) : 0;
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
  t.num_drafts = num_drafts;
  t.no_bonus = no_bonus;
  t.status_after_drafts = outside ? kDraftOutOfRange : 0;
}

// Fills the outputs as if no token were emitted and no draft decided on.
inline __device__ void clear_outputs(const ChainParams& p, const ChainTask& t) {
  const int64_t b = t.b;
  for (int64_t i = thread_id(); i <= p.gamma; i += kThreads) {
    const int64_t at = b * (p.gamma + 1) + i;
    put_id(p.tokens, p.ids_are_int64, at, -1);
    if (p.logprobs != nullptr) p.logprobs[at] = 0;
    if (p.accept_probs != nullptr && i < p.gamma) p.accept_probs[b * p.gamma + i] = NAN;
  }
}

}  // namespace specdec::cuda
