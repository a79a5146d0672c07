#pragma once
// One tree of verify_tree, as every block that works on it opens it, and the memory of a call.
#include "cuda/row/unit.cuh"
#include "cuda/tree/nodes.cuh"

namespace specdec::cuda {

struct TreeSequence : SequenceState {
  int64_t nodes;  // how many have a target row
  int64_t max_tokens;
  int32_t status;
  bool nothing_to_verify;
};

// One for each node and one for the root. The drafts that are subtracted from a target row form a
// linked list of these records.
struct NodeRecord {
  // The draft that the node was tried with:
  DraftDistribution draft;
  float scale;            // the multiple of Q that is subtracted
  int32_t next_draft;     // the next record of the list
  double remaining_mass;  // the mass of Q outside the excluded tokens
  double logprob;         // the node's token under P

  // Rule traversal, the target row after the node:
  double target_scale;   // c, the factor of P
  double accept_prob;    // of the node, given the children rejected so far
  double residual_mass;  // the scale of the next child's Q
  int64_t parent;
  int32_t first_draft, last_draft;  // the drafts subtracted from this row
  int32_t status;                   // reported if the accepted path ends here
  bool ends_path;
};

// A token at which the draft of `node` counts as 0: a sibling rejected before, or one of the top
// tokens of rule top_k_plus_one.
struct ExcludedToken {
  int64_t token;
  int64_t node;
};

constexpr int kFactorsAtOnce = 4;  // of rule k_seq, in one scan

// The arguments of the kernels. Target row 0 follows the root, row n+1 follows node n.
struct TreeJob {
  TreeParams p;
  unsigned long long* tickets;  // [B, rows()]
  RowSummary* summaries;        // [B, rows()]
  Survivor* lists;              // [B, N+1, most_listed(vocab)], null without filters
  TileStatsArray tile_stats;    // [B, rows()]
  TileStatsArray sums;          // [B, sums()]
  NodeRecord* records;          // [B, N+1], only for rules that read the draft
  ExcludedToken* excluded;      // [B, N], the same
  uint32_t* node_sets;          // [B, 3, words()], see NodeSets
  int32_t* first_of_row;        // [B, N], the first node with the draft row of each, if measured
  uint64_t launch_id;
  int splits;  // of a row
  bool measures_drafts;

  // The sums over the warp tiles of a row: of a residual, of a second sum of the scan, of the draft
  // beyond the target's vocabulary; from kOverlap on of overlaps at the factors of rule k_seq.
  enum Sum { kPositive, kSecond, kBeyond, kOverlap };

  SPECDEC_HD int64_t targets() const { return p.nodes + 1; }
  SPECDEC_HD int64_t rows() const { return targets() + (measures_drafts ? p.nodes : 0); }
  SPECDEC_HD int64_t words() const { return (p.nodes + kLanes - 1) / kLanes; }
  SPECDEC_HD int64_t num_sums() const {
    return kOverlap + (p.rule == TreeRule::kKSeq ? kFactorsAtOnce : 0);
  }

  __device__ int64_t slot(const RowUnit& unit) const {
    return unit.b * rows() + (unit.is_draft ? targets() : 0) + unit.i;
  }
  __device__ int64_t target_slot(int64_t b, int64_t node) const { return b * rows() + node + 1; }
  __device__ int64_t draft_slot(int64_t b, int64_t node) const {
    return b * rows() + targets() + first_of_row[b * p.nodes + node];
  }
  __device__ Survivor* list(int64_t b, int64_t node) const {
    if (lists == nullptr) return nullptr;
    return lists + (b * targets() + node + 1) * most_listed(p.vocab);
  }
  __device__ TileStats sum(int64_t b, int which) const { return sums[b * num_sums() + which]; }
  __device__ NodeRecord* records_of(int64_t b) const { return records + b * targets(); }
};

// Opens sequence b. For one thread.
inline __device__ void open(const TreeParams& p, int64_t b, TreeSequence& s) {
  s.status = open_sequence(p, p.rule == TreeRule::kGreedy, b, p.nodes + 1, s);
  s.nothing_to_verify = s.status != 0;
  s.nodes = s.nothing_to_verify ? 0 : s.rows - 1;
  s.max_tokens = most_new_tokens(p, s);
}

// Whether the node is present and valid.
inline __device__ bool is_node(const TreeParams& p, const TreeSequence& s, int64_t n) {
  return n < s.nodes && is_child(p, s.b, n, p.parent(s.b, n));
}

inline __device__ RowView row_after(const TreeParams& p, const TreeSequence& s, int64_t node) {
  return target_row(p, s, node + 1);
}

// The mass that P is measured for: that of a direct row is the sum of its entries.
inline __device__ Want want_of(const TreeParams& p, const TreeSequence& s) {
  return s.direct ? Want::kLinear : p.rule == TreeRule::kMatch ? Want::kGumbel : Want::kMass;
}

// Whether the draft rows are measured. Those of probabilities, and those that come with what
// `sample` returned, are not.
inline __device__ bool measures_drafts(const TreeJob& job, const TreeSequence& s) {
  return job.measures_drafts && s.draft_temperature > 0 && !s.greedy;
}

// Q of node n, at the token x. A one-hot draft has its mass on the node's own token.
inline __device__ void open_draft(const TreeJob& job, const TreeSequence& s, int64_t n, int64_t x,
                                  DraftDistribution& d) {
  const TreeParams& p = job.p;
  const int64_t row = p.draft_row(s.b, n);
  open_draft(p.draft, s.b, row, p.draft.place(s.b, row), x, s.draft_temperature, d);
  if (d.form == DraftForm::kOneHot) {
    d.token = p.drafted(s.b, n);
    d.q_x = x == d.token ? 1 : 0;
    d.log_q_x = log_of(d.q_x);
  }
  if (!d.unmeasured()) return;
  const RowStats& stats = job.summaries[job.draft_slot(s.b, n)].stats;
  d.row_checked = stats.valid;
  d.set(stats);
}

}  // namespace specdec::cuda
