#include "cpu/tree/verifier.h"

namespace specdec::cpu {

TreeStep TreeVerifier::measure_step(int64_t depth, int64_t node) {
  const RowView row = row_after(node);
  measured_ = node;
  return {depth, row, measure_target(row, scratch_.target)};
}

// Siblings that share a draft row share one TriedDraft, so the row is read once. Without
// replacement, tokens are excluded only among siblings of one parent, which were drawn together.
TriedDraft& TreeVerifier::tried_draft(Residual& residual, int64_t node, int64_t x) {
  const bool one_hot = p_.draft.form == DraftForm::kOneHot || state_.draft_temperature == 0;
  const bool with_replacement = p_.rule != TreeRule::kMultiDraftWor;
  const int64_t parent = with_replacement ? kRoot : nodes_.parents[node];
  const int64_t key = !one_hot ? draft_row(node) : with_replacement ? x : node;
  TriedDraft& tried = residual.tried(parent, key, [&] { return draft_of(node); });
  tried.draft.look_up(x);
  return tried;
}

DraftDistribution TreeVerifier::draft_of(int64_t node) {
  const int64_t row = draft_row(node);
  return draft_distribution(p_.draft, b_, row, p_.draft.place(b_, row), token(node),
                            state_.draft_temperature, parallel_, scratch_.draft);
}

int64_t TreeVerifier::draw_target(const TreeStep& step) {
  return draw(step.row, step.stats, scratch_.target, residual_uniform(p_, state_, step.depth));
}

}  // namespace specdec::cpu
