#pragma once
// One sequence of verify_tree: its nodes, its uniforms and its outputs.
#include "cpu/chain/sequence.h"
#include "cpu/tree/nodes.h"
#include "specdec/tree.h"

namespace specdec::cpu {

class TreeSequence : protected SequenceView<TreeParams> {
 public:
  TreeSequence(const TreeParams& p, int64_t b, const Parallel& parallel, Nodes& nodes)
      : SequenceView(p, b, parallel), nodes_(nodes) {}

 protected:
  // Reads parameters and nodes; false if no token is to be emitted.
  bool open_tree();
  // Fills the outputs as if nothing were emitted and no node tested.
  void clear() const;

  int64_t token(int64_t node) const { return nodes_.tokens[node]; }
  // The target row that predicts the token after a node.
  RowView row_after(int64_t node) const { return target_row(node + 1); }
  // The draft row that a node was drawn from.
  int64_t draft_row(int64_t node) const { return p_.draft_row(b_, node); }

  // Whether no token follows `node`: it is an end-of-sequence token or the last one allowed.
  bool ends_at(int64_t depth, int64_t node) const;

  // Appends an accepted node to the path.
  void accept(int64_t depth, int64_t node, double logprob) const;
  void write(int64_t depth, int64_t token, double logprob) const {
    write_at(b_ * (p_.max_depth + 1) + depth, token, logprob);
  }
  void record_accept_prob(int64_t node, double probability) const {
    record_accept_prob_at(b_ * p_.nodes + node, probability);
  }

  Nodes& nodes_;

 private:
  // False if a node is out of range.
  bool read_nodes(int64_t n);

  int64_t max_tokens_ = 0;
};

}  // namespace specdec::cpu
