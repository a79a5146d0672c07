#include "cpu/tree_sequence.h"

#include "cpu/difference.h"

namespace specdec {

bool TreeSequence::prepare() {
  params_ = params_of(p_.sampling, b_);
  q_temperature_ = params_.temperature;
  if (p_.reads_draft() && p_.draft.form == DraftForm::kSampled) {
    q_temperature_ = p_.draft.temperatures ? p_.draft.temperatures[b_] : p_.draft.temperature;
  }
  if (!params_.valid() || !(std::isfinite(q_temperature_) && q_temperature_ >= 0)) {
    status_ = kBadParameter;
    return false;
  }
  if (p_.rule == TreeRule::kGreedy) params_ = {0.0f, 0, 1.0f, 0.0f};
  point_ = params_.temperature == 0;
  direct_ = p_.kind == Kind::kProbs && p_.reads_draft() && params_.temperature == 1 &&
            !params_.filters(p_.vocab);
  int64_t rows = p_.nodes + 1;
  if (p_.cu_rows != nullptr) {
    begin_ = std::clamp<int64_t>(p_.cu_rows[b_], 0, p_.num_rows);
    const int64_t end = std::clamp<int64_t>(p_.cu_rows[b_ + 1], begin_, p_.num_rows);
    rows = std::min(rows, end - begin_);
  }
  if (rows == 0) {
    status_ = kTargetNotFinite;
    return false;
  }
  if (!read_nodes(rows - 1)) status_ |= kDraftOutOfRange;
  most_ = p_.max_emit != nullptr ? std::max<int64_t>(0, p_.max_emit[b_]) : rows;
  return most_ > 0;
}

TreePoint TreeSequence::measure_point(int64_t depth, int64_t node) {
  TreePoint point{depth, target_row(node), {}};
  measured_ = node;
  if (p_.kind == Kind::kProbs && (direct_ || point_)) {
    point.law = measure_direct(point.row, parallel_, scratch_.target);
    if (direct_ || !point.law.finite) return point;
  }
  point.law = measure(point.row, params_, parallel_, scratch_.target);
  return point;
}

Taken& TreeSequence::law_of(Left& left, int64_t node, int64_t x) {
  const bool certain = p_.draft.form == DraftForm::kPointMass || q_temperature_ == 0;
  const bool replaced = p_.rule != TreeRule::kMultiDraftWor;
  const int64_t key = !certain ? law_row(node) : replaced ? x : node;
  Taken& taken =
      left.taken(replaced ? kRoot : nodes_.parents[node], key, [&] { return draft_of(node); });
  taken.draft.look_up(x);
  return taken;
}

DraftLaw TreeSequence::draft_of(int64_t node) {
  const int64_t row = law_row(node);
  const int64_t statistic = p_.draft.flat ? row : b_ * p_.draft.num_rows + row;
  return draft_law(p_.draft, b_, row, statistic, token(node), q_temperature_, parallel_,
                   scratch_.draft);
}

int64_t TreeSequence::draw_target(const TreePoint& point) {
  const auto& [depth, row, law] = point;
  if (!law.direct) return draw(row, law, scratch_.target, last(depth));
  return draw(row, scratch_.target.sums, last(depth),
              [&](int64_t t, float* out) { target_weights(row, law, t, 1.0, out); });
}

}  // namespace specdec
