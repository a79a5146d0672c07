#pragma once
// What the blocks of a group know of the tree they verify, each in its own shared memory.
#include "cuda/chain/residual.cuh"
#include "specdec/tree.h"

namespace specdec::cuda {

// What all threads of a group do together; see chain_task.cuh. kThink is nothing: the judge goes
// on. The actions from kScan on go through warp_tiles of the target and of drafts together.
enum class TreeAction : int32_t {
  kThink,
  kMeasure,  // one row
  kLookUp,   // a sparse draft
  kSeek,
  kSurvey,
  kFew,
  kDone,
  kScan,
  kLook,
  kDraw
};

// Where the judge is. What several verdicts lead to stands at one place in the code.
enum class TreeState : int32_t {
  kEnter,      // a node, or the root
  kArrived,    // the law of its row is known
  kNext,       // the next candidate
  kOpen,       // a candidate
  kCandidate,  // the law of its draft is known
  kVerdict,    // against P and a multiple of Q
  kLeft,       // what is left at its token is known
  kReject,
  kStand,
  kSubtract,  // what is left after a rejection is known
  kRest,      // the mass that a draft has off the tokens tried
  kFactor,    // rule k_seq: what is accepted with some factors
  kEntropy,
  kSurveyed,
  kSettle,  // rule traversal: all below a node is judged
  kAccept,
  kBack,    // what is left after a child is known
  kAgain,   // what is left, scanned again to draw from it
  kRow,     // the row again, to draw from it
  kWhole,   // its law is known
  kAnswer,  // a token was drawn
  kEnd
};

// What a scan makes of P and Q.
enum class Scan : int32_t {
  kLeft,      // cP less the entries, and for rule traversal what the last one has above it
  kOff,       // the same with Q off the tokens tried, and the mass of that
  kRest,      // that mass alone
  kFactors,   // sums of min(Q, P / rho) for some factors
  kAccepted,  // P less a part of min(Q, P / rho)
  kEntropy
};

constexpr int kFactorsAtOnce = 4;
constexpr int kNone = -1;

// One a node and one for the root. Of the draft that a node was tried with, and in rule traversal
// of the target's row behind it.
struct TreeRecord {
  DraftDistribution draft;
  RowStats q_stats;  // of a measured draft
  float scale;       // of Q in what is left
  int32_t next;      // entry of the same point
  double rest;       // mass of Q off the tokens of this law that were tried
  double logprob;
  // The row behind.
  RowStats stats;
  double c, stands;  // factor of P; probability to accept the node, so far
  double mass;
  int64_t parent, child;
  int32_t first, last;  // entries
  int32_t status;
  bool measured, over;
};

// A token that was tried in vain, and the node that it was.
struct Tried {
  int64_t token;
  int64_t node;
};

struct TreeTask : SequenceState {
  // Of the group and of this block.
  int64_t context;      // which slots
  TreeRecord* records;  // [N+1], rules that read the draft
  Tried* tried;         // [N], the same
  uint32_t* sets;       // three of nodes
  unsigned rank;
  // Of the sequence.
  int64_t nodes;  // how many have a row
  int32_t status, accepted;
  bool over;
  int64_t most;  // tokens that may be emitted
  // Of the row at hand.
  TreeState state;
  TreeAction action;
  Scan scan;
  int64_t here;      // its node
  int64_t depth;     // of the node
  int64_t child, x;  // candidate and its token
  int64_t lane;      // number of the candidate in the list
  int64_t but;       // candidate that is no answer
  int64_t num_children;
  bool gathers;   // finds the children first
  bool residual;  // what a draw is from
  bool known;     // the difference at hand is that of the last scan
  bool valid;     // of the drafts, in the last scan
  int turn, draft_turn;
  int32_t first, last;  // entries
  int32_t num_tried;
  RowView row;
  TileStats tile_stats;
  RowView source;  // what is measured
  TileStats sink;
  bool of_draft;
  RowStats stats, q_stats;
  DraftDistribution draft;
  double c;             // factor of P
  double mass;          // of what is left
  double more, second;  // sums of a scan
  double left;          // at the candidate's token
  double rest;          // of the candidate's law, off the tokens tried
  double bound;         // rule typical
  double rho[kFactorsAtOnce], accepted_at[kFactorsAtOnce];
  double low, high, low_gap, high_gap, beta;  // of rule k_seq
  int passes;
  double factor;  // of Q in a verdict
  int64_t token;  // what the target says, or what was drawn
};

// A copy a word at a time: a wide one would take the registers of all of it at once.
template <class T>
inline __device__ void copy(T& to, const T& from) {
  constexpr size_t kWord = sizeof(uint32_t);
  auto* const out = reinterpret_cast<unsigned char*>(&to);
  const auto* const in = reinterpret_cast<const unsigned char*>(&from);
#pragma unroll 1
  for (size_t i = 0; i < sizeof(T); i += kWord) memcpy(out + i, in + i, kWord);
}

struct TreeJob {
  TreeParams p;
  CudaPlan plan;
  TileStatsArray tile_stats_array;
  TreeRecord* records;  // [blocks, N+1], rules that read the draft
  Tried* tried;         // [blocks, N], the same
  uint32_t* sets;       // [blocks, 3, words]

  SPECDEC_HD int64_t words() const { return (p.nodes + kLanes - 1) / kLanes; }
  // Two of target rows and two of drafts in turns, then those of a scan.
  SPECDEC_HD int64_t context_tile_stats() const {
    return 7 + (p.rule == TreeRule::kKSeq ? kFactorsAtOnce : 0);
  }
};

inline __device__ int64_t parent_of(const TreeParams& p, int64_t b, int64_t n) {
  return p.parent(b, n);
}

inline __device__ bool lawful_node(const TreeParams& p, int64_t n, int64_t token, int64_t parent) {
  return p.valid_node(n, token, parent);
}

// Whether n hangs below `parent`.
inline __device__ bool child_of(const TreeParams& p, int64_t b, int64_t n, int64_t parent) {
  const int64_t x = p.drafted(b, n);
  return parent_of(p, b, n) == parent && x != -1 && lawful_node(p, n, x, parent);
}

// The row of the law that node n was drawn from.
inline __device__ int64_t draft_row(const TreeParams& p, int64_t b, int64_t n) {
  return p.draft_row(b, n);
}

// Whether two nodes were drawn from one law; without replacement also together, below one node.
inline __device__ bool same_draft_row(const TreeParams& p, int64_t b, int64_t n, int64_t m) {
  return draft_row(p, b, n) == draft_row(p, b, m) &&
         (p.rule != TreeRule::kMultiDraftWor || parent_of(p, b, n) == parent_of(p, b, m));
}

// Q of node n, at the token x; see draft.cuh. A point mass is on the node's own token.
inline __device__ void open_draft(const TreeParams& p, const TreeTask& t, int64_t n, int64_t x,
                                  DraftDistribution& d) {
  const int64_t row = draft_row(p, t.b, n);
  open_draft(p.draft, t.b, row, p.draft_statistic(t.b, row), x, t.q_temperature, d);
  if (d.form != DraftForm::kOneHot) return;
  d.token = p.drafted(t.b, n);
  d.q_x = x == d.token ? 1 : 0;
  d.log_q_x = log(d.q_x);
}

// Parameters and rows of sequence b. For one thread.
inline __device__ void open_sequence(const TreeParams& p, int64_t b, TreeTask& t) {
  t.accepted = 0;
  t.status = open_sequence(p, p.rule == TreeRule::kGreedy, b, p.nodes + 1, t);
  t.over = t.status != 0;
  t.nodes = t.over ? 0 : t.rows - 1;
  t.most = most_new_tokens(p, t);
}

// Whether a node with a row is out of range; for the whole block.
inline __device__ void check_nodes(BlockGroup& group, const TreeParams& p, TreeTask& t) {
  int64_t faults = 0;
  for (int64_t n = thread_id(); n < t.nodes; n += kThreads) {
    faults += !lawful_node(p, n, p.drafted(t.b, n), parent_of(p, t.b, n));
  }
  faults = group.sum(faults);
  if (thread_id() == 0 && faults > 0) t.status |= kDraftOutOfRange;
}

// Nothing emitted, nothing judged.
inline __device__ void clear_outputs(const BlockGroup& group, const TreeParams& p, int64_t b) {
  if (group.rank != 0) return;
  for (int64_t i = thread_id(); i <= p.max_depth; i += kThreads) {
    const int64_t at = b * (p.max_depth + 1) + i;
    if (i < p.max_depth) put_id(p.path, p.parents_are_int64, b * p.max_depth + i, -1);
    put_id(p.tokens, p.ids_are_int64, at, -1);
    if (p.logprobs != nullptr) p.logprobs[at] = 0;
  }
  if (p.accept_probs == nullptr) return;
  for (int64_t n = thread_id(); n < p.nodes; n += kThreads) p.accept_probs[b * p.nodes + n] = NAN;
}

}  // namespace specdec::cuda
