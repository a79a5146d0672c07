#pragma once
// Rule traversal: nodes are tested from the leaves to the root, children in the order of their
// numbers. On a tree without siblings it equals rule block of verify_chain. See
// docs/rules.md#traversal.
#include "cpu/tree/verifier.h"

namespace specdec::cpu {

class TraversalVerifier final : public TreeVerifier {
 public:
  using TreeVerifier::TreeVerifier;

 private:
  void decide() override;
  // Descends to a node whose acceptance probability, before its own children count, is given.
  void enter(int64_t node, double accept_prob);
  // residual(x) / Q(x), times the residual's scale.
  double acceptance_ratio(const Residual& residual, int64_t x,
                          const DraftDistribution& draft) const;
  bool accepts(const TraversalLevel& level) const;
  // Subtracts the draft of the child tried last, which was rejected with all nodes below it.
  void subtract_child(TraversalLevel& level);
  // Emits the recovered or bonus token after the accepted path.
  void emit_next(int64_t depth, TraversalLevel& level);
};

}  // namespace specdec::cpu
