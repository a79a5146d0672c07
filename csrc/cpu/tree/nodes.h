#pragma once
// What the rules of verify_tree read and write of one sequence.
#include <vector>

#include "cpu/chain/sequence.h"
#include "specdec/tree.h"

namespace specdec::cpu {

constexpr int64_t kRoot = -1, kNone = -1;

// The nodes of one sequence that can be judged; siblings in the order of their numbers.
struct Nodes {
  std::vector<int64_t> tokens;   // [N]
  std::vector<int64_t> parents;  // [N]
  std::vector<int64_t> first;    // [N+1], of node n at n+1: its first child
  std::vector<int64_t> next;     // [N], the sibling after it

  int64_t first_child(int64_t node) const { return first[node + 1]; }
};

class TreeView : protected SequenceView<TreeParams> {
 public:
  TreeView(const TreeParams& p, int64_t b, const Parallel& parallel, Nodes& nodes)
      : SequenceView(p, b, parallel), nodes_(nodes) {}

 protected:
  // P of what follows a node.
  RowView row_after(int64_t node) const { return target_row(node + 1); }

  // Absent nodes are no child of any; returns false if one that is there is out of range.
  bool read_nodes(int64_t n) {
    bool valid = true;
    nodes_.tokens.assign(n, kNone);
    nodes_.parents.assign(n, kNone);
    nodes_.next.assign(n, kNone);
    nodes_.first.assign(n + 1, kNone);
    while (--n >= 0) {
      const int64_t x = drafted(n);
      const int64_t parent = p_.parent(b_, n);
      if (!p_.valid_node(n, x, parent)) {
        valid = false;
      } else if (x != kNone) {
        nodes_.tokens[n] = x;
        nodes_.parents[n] = parent;
        nodes_.next[n] = nodes_.first[parent + 1];
        nodes_.first[parent + 1] = n;
      }
    }
    return valid;
  }

  int64_t token(int64_t node) const { return nodes_.tokens[node]; }
  // The row of the law that a node was drawn from.
  int64_t draft_row(int64_t node) const {
    return p_.draft_row(b_, node);
  }

  double accept_uniform(int64_t node, int64_t depth, int64_t lane) const {
    return specdec::accept_uniform(p_, state_, node, depth, lane);
  }
  double last(int64_t depth) const {
    return residual_uniform(p_, state_, depth);
  }

  // Whether nothing follows: a token ends the text or is the last that is allowed.
  bool over(int64_t depth, int64_t node) const {
    return depth == most_ || (depth > 0 && is_eos(p_, token(node)));
  }

  void clear() const {
    for (int64_t d = 0; d <= p_.max_depth; ++d) write(d, kNone, 0);
    for (int64_t d = 0; d < p_.max_depth; ++d) {
      put_id(p_.path, p_.parents_are_int64, b_ * p_.max_depth + d, kNone);
    }
    for (int64_t n = 0; n < p_.nodes; ++n) record_accept_prob(n, NAN);
    p_.num_accepted[b_] = 0;
  }
  void accept(int64_t depth, int64_t node, double logprob) const {
    put_id(p_.path, p_.parents_are_int64, b_ * p_.max_depth + depth, node);
    write(depth, token(node), logprob);
    ++p_.num_accepted[b_];
  }
  void write(int64_t depth, int64_t token, double logprob) const {
    write_at(b_ * (p_.max_depth + 1) + depth, token, logprob);
  }
  // The probability with which a node was to be accepted.
  void record_accept_prob(int64_t node, double probability) const {
    record_accept_prob_at(b_ * p_.nodes + node, probability);
  }

  Nodes& nodes_;
  int64_t most_ = 0;  // tokens that may be emitted
};

}  // namespace specdec::cpu
