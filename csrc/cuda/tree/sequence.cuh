#pragma once
// What each block knows of the tree it verifies, in its own shared memory, and what it keeps of
// each node in global memory.
#include "cuda/tree/nodes.cuh"
#include "cuda/tree/state.cuh"

namespace specdec::cuda {

constexpr int kFactorsAtOnce = 4;  // of rule k_seq, in one scan

// One for each node and one for the root. The drafts that a scan subtracts from the current target
// row are a linked list of these records.
struct NodeRecord {
  // The draft that the node was tried with.
  DraftDistribution draft;
  RowStats q_stats;       // of a measured draft
  float scale;            // the multiple of Q that is subtracted
  int32_t next_draft;     // the next one subtracted from the same row
  double remaining_mass;  // of Q outside the excluded tokens
  double logprob;         // of the node's token
  // Rule traversal: the target row after the node.
  RowStats stats;
  double target_scale, accept_prob;  // factor of P; acceptance probability of the node so far
  double residual_mass;
  int64_t parent;
  int32_t first_draft, last_draft;  // subtracted from this row
  int32_t status;                   // reported if the accepted path ends here
  bool measured, ends_path;
};

// A token at which the draft of `node` counts as 0: a sibling rejected before, or one of the top
// tokens of rule top_k_plus_one.
struct ExcludedToken {
  int64_t token;
  int64_t node;
};

struct TreeTask : SequenceState {
  // Of the group and of this block.
  int64_t context;          // which tile statistics are the group's
  NodeRecord* records;      // [N+1], only for rules that read the draft
  ExcludedToken* excluded;  // [N], the same
  uint32_t* node_sets;      // [3, words], see Siblings
  unsigned rank;
  // Of the sequence.
  int64_t nodes;  // how many have a target row
  int32_t status, accepted;
  bool over;  // nothing can be verified
  int64_t max_tokens;
  // Of the current step.
  TreeState state;
  TreeAction action;
  ScanKind scan;
  int64_t node;        // the last node of the path, whose children are tried
  int64_t depth;       // of the token after it
  int64_t child, x;    // the child being tried and its token
  int64_t trial;       // its number among the children tried
  int64_t last_tried;  // top_k_plus_one: the child that was tried, which cannot be accepted later
  int64_t num_children;
  bool gathers_children;            // kMeasure also finds the children of the path
  bool from_residual;               // kDraw draws from the residual, else from P
  bool residual_known;              // the last scan summed the residual that is drawn from
  bool drafts_valid;                // the last scan found the subtracted draft rows valid
  int turn, draft_turn;             // which of two tile statistics is written next
  int32_t first_draft, last_draft;  // subtracted from the target row
  int32_t num_excluded;
  RowView row;
  TileStats tile_stats;
  RowView measured_row;  // of kMeasure: a target or a draft row
  TileStats measured_tile_stats;
  bool measures_draft;
  RowStats stats, q_stats;
  DraftDistribution draft;  // of the child being tried
  double target_scale;      // c, the factor of P
  double residual_mass;
  double positive_sum;    // of a scan: the residual's mass, or the entropy term
  double second_sum;      // mass of Q outside excluded tokens; traversal: of Q above the residual
  double residual_at_x;   // at the child's token
  double remaining_mass;  // of the child's Q outside excluded tokens
  double total_mass;      // of the weights that a token was drawn from
  double typical_bound;
  double factors[kFactorsAtOnce], overlaps[kFactorsAtOnce];
  double low, high, low_gap, high_gap, beta;  // search of rule k_seq, see k_seq.cuh
  int passes;
  double draft_scale;  // the multiple of Q that a child is tested against
  int64_t token;       // what the target predicts, or what was drawn
};

// Copies word by word: a plain assignment would hold the whole struct in registers.
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
  NodeRecord* records;      // [blocks, N+1], only for rules that read the draft
  ExcludedToken* excluded;  // [blocks, N], the same
  uint32_t* node_sets;      // [blocks, 3, words]

  SPECDEC_HD int64_t words() const { return (p.nodes + kLanes - 1) / kLanes; }

  // Tile statistics of one group: two take turns for target rows and two for draft rows, the rest
  // belong to scans.
  static constexpr int kTargetStats = 0, kDraftStats = 2, kScanStats = 4;
  SPECDEC_HD int64_t context_tile_stats() const {
    return 7 + (p.rule == TreeRule::kKSeq ? kFactorsAtOnce : 0);
  }
  __device__ TileStats tile_stats(int64_t context, int64_t i) const {
    return tile_stats_array[context * context_tile_stats() + i];
  }
};

// Q of node n, at the token x. A one-hot draft has its mass on the node's own token.
inline __device__ void open_draft(const TreeParams& p, const TreeTask& t, int64_t n, int64_t x,
                                  DraftDistribution& d) {
  const int64_t row = p.draft_row(t.b, n);
  open_draft(p.draft, t.b, row, p.draft_statistic(t.b, row), x, t.q_temperature, d);
  if (d.form != DraftForm::kOneHot) return;
  d.token = p.drafted(t.b, n);
  d.q_x = x == d.token ? 1 : 0;
  d.log_q_x = log(d.q_x);
}

// Reads parameters and target rows of sequence b. For one thread.
inline __device__ void open_sequence(const TreeParams& p, int64_t b, TreeTask& t) {
  t.accepted = 0;
  t.status = open_sequence(p, p.rule == TreeRule::kGreedy, b, p.nodes + 1, t);
  t.over = t.status != 0;
  t.nodes = t.over ? 0 : t.rows - 1;
  t.max_tokens = most_new_tokens(p, t);
}

// Reports nodes out of range. For the whole block.
inline __device__ void check_nodes(BlockGroup& group, const TreeParams& p, TreeTask& t) {
  int64_t faults = 0;
  for (int64_t n = thread_id(); n < t.nodes; n += kThreads) {
    faults += !p.valid_node(n, p.drafted(t.b, n), p.parent(t.b, n));
  }
  faults = group.sum(faults);
  if (thread_id() == 0 && faults > 0) t.status |= kDraftOutOfRange;
}

// Fills the outputs as if nothing were emitted and no node tested.
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
