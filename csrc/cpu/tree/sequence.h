#pragma once
// What the rules of verify_tree have in common of one sequence.
#include "cpu/tree/nodes.h"
#include "cpu/tree/residual.h"
#include "specdec/parallel.h"

namespace specdec::cpu {

// One point of the tree: what has been accepted, and the row that judges what follows.
struct TreePoint {
  int64_t depth;
  RowView row;
  RowStats stats;
};

// A node of the path that rule traversal is on.
struct Level {
  int64_t node;
  Left left;           // of what follows it
  double accepted;     // probability so far
  int64_t next;        // child to be judged
  Taken* judged;       // law of the child that is
  int32_t status = 0;  // if it is the last node that stands
};

struct TreeScratch {
  Scratch target, draft;
  std::vector<float> entropies;  // [tiles]
  LeftMemory left;
  Nodes nodes;
  std::vector<int64_t> members;   // nodes that spell the path so far
  std::vector<int64_t> children;  // of all of them
  std::vector<int64_t> distinct;  // the first of them with each token
  std::deque<Level> levels;
};

class TreeSequence : protected TreeView {
 public:
  TreeSequence(const TreeParams& p, int64_t b, const Parallel& parallel, TreeScratch& scratch)
      : TreeView(p, b, parallel, scratch.nodes), scratch_(scratch) {}

  void verify() {
    clear();
    if (prepare()) judge();
    p_.status[b_] = status_;
  }

 protected:
  ~TreeSequence() = default;
  virtual void judge() = 0;

  TreePoint measure_point(int64_t depth, int64_t node);
  // Of siblings with one row the law is read once. Without replacement, what was drawn of it counts
  // for the siblings of one parent.
  Taken& taken_of(Left& left, int64_t node, int64_t x);
  DraftDistribution draft_of(int64_t node);
  int64_t draw_target(const TreePoint& point);

  TreeScratch& scratch_;
  int64_t measured_ = kRoot;  // node whose row scratch_.target is of

 private:
  // False if there is nothing to judge.
  bool prepare();
};

// Rule traversal.
class Traversal final : public TreeSequence {
 public:
  using TreeSequence::TreeSequence;

 private:
  void judge() override;
  void open(int64_t node, double accepted);
  double ratio_of(const Left& left, int64_t x, const DraftDistribution& draft) const;
  bool accepted(const Level& level) const;
  void subtract(Level& level);
  void follow(int64_t depth, Level& level);
};

}  // namespace specdec::cpu
