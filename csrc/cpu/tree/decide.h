#pragma once
// Every rule but traversal: from the root down, each step accepts one child or emits the token that
// ends the path. At temperature 0 every rule decides here, as rule greedy does.
#include "cpu/tree/verifier.h"

namespace specdec::cpu {

class TopDownVerifier final : public TreeVerifier {
 public:
  using TreeVerifier::TreeVerifier;

 private:
  // The outcome of one step: an accepted child, or kNone and the recovered or bonus token.
  struct Decision {
    int64_t child;
    int64_t token;
  };

  void decide() override;
  void find_children(int64_t depth);
  Decision decide_step(const TreeStep& step);

  // Rules greedy, match and target_only: the target names a token, and the child that holds it is
  // accepted.
  Decision match_target(const TreeStep& step);
  // The other rules, by name; multi_draft includes multi_draft_wor.
  Decision typical(const TreeStep& step);
  Decision multi_draft(const TreeStep& step);
  Decision top_k_plus_one(const TreeStep& step);
  Decision k_seq(const TreeStep& step);

  // Whether trial number `trial` accepts `node`: u * s * Q(x) < residual(x), strictly.
  bool accepts(const TreeStep& step, const Residual& residual, int64_t node, int64_t trial,
               const DraftDistribution& draft, double s) const;
  // Records the test of a node; returns whether it was accepted.
  bool record_test(int64_t node, const Acceptance& a) const;
  // A residual from which nothing was subtracted yet.
  Residual full_residual(const TreeStep& step);
  // The token after all children were rejected; drawn from P if the residual is empty.
  int64_t draw_recovered(const TreeStep& step, Residual& residual);

  // The first child with each token.
  std::vector<int64_t>& distinct_tokens();
  // The first child with each token among those of one parent and one draft row.
  std::vector<int64_t>& distinct_draws();
  int64_t find(const std::vector<int64_t>& nodes, int64_t x) const;
  const Survivors* survivors(const RowStats& stats) const {
    return stats.listed ? scratch_.target.survivors.get() : nullptr;
  }
};

}  // namespace specdec::cpu
