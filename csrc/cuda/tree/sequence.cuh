#pragma once
// The state of one tree: a TreeTask in the shared memory of each block, and a NodeRecord for each
// node in global memory.
#include "cuda/tree/nodes.cuh"
#include "cuda/tree/state.cuh"

namespace specdec::cuda {

constexpr int kFactorsAtOnce = 4;  // of rule k_seq, in one scan

// One for each node and one for the root. The drafts that a scan subtracts from the current target
// row form a linked list of these records.
struct NodeRecord {
  // The draft that the node was tried with:
  DraftDistribution draft;
  RowStats q_stats;       // its statistics, if its row had to be measured
  float scale;            // the multiple of Q that is subtracted
  int32_t next_draft;     // the next record of the list
  double remaining_mass;  // the mass of Q outside the excluded tokens
  double logprob;         // the node's token under P

  // Rule traversal, the target row after the node:
  RowStats stats;
  double target_scale;   // c, the factor of P
  double accept_prob;    // of the node, given the children rejected so far
  double residual_mass;  // the scale of the next child's Q
  int64_t parent;
  int32_t first_draft, last_draft;  // the drafts subtracted from this row
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
  // The workspace of the group and of this block:
  int64_t context;          // index of the group
  NodeRecord* records;      // [N+1], only for rules that read the draft
  ExcludedToken* excluded;  // [N], the same
  uint32_t* node_sets;      // [3, words], see NodeSets
  unsigned rank;            // this block's place in the group

  // The sequence:
  int64_t nodes;  // how many have a target row
  int64_t max_tokens;
  int32_t status, accepted;
  bool nothing_to_verify;

  // The state machine:
  TreeState state;
  TreeAction action;
  ScanKind scan;
  bool gathers_children;    // kMeasure also finds the children of the path
  bool from_residual;       // kDraw draws from the residual, else from P
  bool residual_is_summed;  // the last scan summed the residual that a token will be drawn from
  bool drafts_valid;        // the last scan found the subtracted draft rows valid
  int stats_buffer, draft_stats_buffer;  // which of two tile statistics is in use

  // The current step:
  int64_t node;        // last node of the path
  int64_t depth;       // of the token after it
  int64_t child, x;    // the child being tried and its token
  int64_t trial;       // how many children were tried before it
  int64_t last_tried;  // top_k_plus_one: the only child that is tried
  int64_t num_children;
  RowView row;  // the target row after the node
  RowStats stats;
  TileStats tile_stats;
  DraftDistribution draft;  // of the child
  RowStats q_stats;         // the statistics of its row, if that had to be measured
  RowView measured_row;     // what kMeasure reads: a target or a draft row
  TileStats measured_tile_stats;
  bool measures_draft;

  // The residual of the target row:
  double target_scale;              // c, the factor of P
  int32_t first_draft, last_draft;  // the drafts subtracted from it
  int32_t num_excluded;
  double residual_mass;   // the scale of the next child's Q
  double residual_at_x;   // the residual at the child's token
  double remaining_mass;  // the mass of the child's Q outside the excluded tokens
  double positive_sum;    // result of a scan: the residual's mass; kEntropy: its sum
  double second_sum;      // result of a scan: the mass of Q outside the excluded tokens; under rule
                          // traversal, by how much Q exceeds the residual

  // Single rules:
  double total_mass;     // target_only, top_k_plus_one: the mass that a token was drawn from
  double typical_bound;  // typical: a child must be likelier
  double factors[kFactorsAtOnce], overlaps[kFactorsAtOnce];  // k_seq: factors rho and their beta
  double low, high, low_gap, high_gap, beta;                 // k_seq: the search, see k_seq.cuh
  int passes;                                                // k_seq: scans so far
  double draft_scale;  // k_seq, top_k_plus_one: the multiple of Q that a child is tested against

  int64_t token;  // what the target predicts, or what was drawn
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

  // Tile statistics of one group: two for target rows and two for draft rows, which alternate; the
  // rest belong to scans.
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
  open_draft(p.draft, t.b, row, p.draft_statistic(t.b, row), x, t.draft_temperature, d);
  if (d.form != DraftForm::kOneHot) return;
  d.token = p.drafted(t.b, n);
  d.q_x = x == d.token ? 1 : 0;
  d.log_q_x = log(d.q_x);
}

// Reads parameters and target rows of sequence b. For one thread.
inline __device__ void open_sequence(const TreeParams& p, int64_t b, TreeTask& t) {
  t.accepted = 0;
  t.status = open_sequence(p, p.rule == TreeRule::kGreedy, b, p.nodes + 1, t);
  t.nothing_to_verify = t.status != 0;
  t.nodes = t.nothing_to_verify ? 0 : t.rows - 1;
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
  if (group.rank() != 0) return;
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
