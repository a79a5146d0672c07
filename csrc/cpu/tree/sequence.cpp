#include "cpu/tree/sequence.h"

namespace specdec::cpu {

bool TreeSequence::prepare() {
  const int64_t rows = open(p_.rule == TreeRule::kGreedy, p_.nodes + 1);
  if (rows == 0) return false;
  if (!read_nodes(rows - 1)) status_ |= kDraftOutOfRange;
  most_ = most_new_tokens(p_, state_);
  return most_ > 0;
}

TreePoint TreeSequence::measure_point(int64_t depth, int64_t node) {
  const RowView row = row_after(node);
  measured_ = node;
  return {depth, row, measure_target(row, scratch_.target)};
}

Taken& TreeSequence::taken_of(Left& left, int64_t node, int64_t x) {
  const bool certain = p_.draft.form == DraftForm::kOneHot || state_.q_temperature == 0;
  const bool replaced = p_.rule != TreeRule::kMultiDraftWor;
  const int64_t key = !certain ? draft_row(node) : replaced ? x : node;
  Taken& taken =
      left.taken(replaced ? kRoot : nodes_.parents[node], key, [&] { return draft_of(node); });
  taken.draft.look_up(x);
  return taken;
}

DraftDistribution TreeSequence::draft_of(int64_t node) {
  const int64_t row = draft_row(node);
  return draft_distribution(p_.draft, b_, row, p_.draft_statistic(b_, row), token(node),
                            state_.q_temperature, parallel_, scratch_.draft);
}

int64_t TreeSequence::draw_target(const TreePoint& point) {
  return draw(point.row, point.stats, scratch_.target, last(point.depth));
}

}  // namespace specdec::cpu
