#pragma once
// The base of the two verifiers: TopDownVerifier (decide.h) accepts a child of each node from the
// root down, TraversalVerifier (traversal.h) tests nodes from the leaves up.
#include <deque>
#include <vector>

#include "cpu/tree/residual.h"
#include "cpu/tree/sequence.h"
#include "specdec/parallel.h"

namespace specdec::cpu {

// One step down the tree: the target row after a node, which decides about the node's children.
struct TreeStep {
  int64_t depth;
  RowView row;
  RowStats stats;
};

// A node of the path that rule traversal currently looks at.
struct TraversalLevel {
  int64_t node;
  Residual residual;   // of the row after the node
  double accept_prob;  // of the node, given all children rejected so far
  int64_t next_child;  // kNone: all were tried
  TriedDraft* tried;   // draft of the child tried last
  int32_t status = 0;  // reported if the accepted path ends at this node
};

// Reused from sequence to sequence.
struct TreeScratch {
  Scratch target, draft;
  std::vector<float> entropies;  // [tiles]
  ResidualScratch residual;
  Nodes nodes;
  std::vector<int64_t> path_nodes;  // nodes whose path spells the tokens accepted so far
  std::vector<int64_t> children;    // children of all path_nodes
  std::vector<int64_t> distinct;    // children without those that repeat an earlier one
  std::deque<TraversalLevel> levels;
};

class TreeVerifier : protected TreeSequence {
 public:
  TreeVerifier(const TreeParams& p, int64_t b, const Parallel& parallel, TreeScratch& scratch)
      : TreeSequence(p, b, parallel, scratch.nodes), scratch_(scratch) {}

  void verify() {
    clear();
    if (open_tree()) decide();
    p_.status[b_] = status_;
  }

 protected:
  ~TreeVerifier() = default;
  virtual void decide() = 0;

  // Row statistics of the target row after `node`, in scratch_.target.
  TreeStep measure_step(int64_t depth, int64_t node);
  // The draft distribution of `node` within a residual, looked up at token x.
  TriedDraft& tried_draft(Residual& residual, int64_t node, int64_t x);
  DraftDistribution draft_of(int64_t node);
  int64_t draw_target(const TreeStep& step);

  TreeScratch& scratch_;
  int64_t measured_ = kRoot;  // the node whose row scratch_.target describes
};

}  // namespace specdec::cpu
