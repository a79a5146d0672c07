#include "cpu/tree/traversal.h"

#include <algorithm>
#include <cmath>

namespace specdec::cpu {
namespace {

void skip_children(TraversalLevel& level, int32_t status) {
  level.next_child = kNone;
  level.status = status;
}

}  // namespace

// Depth first: descend to the first leaf; test it; if it is rejected, subtract its draft from the
// residual of its parent and go on with the next sibling, or test the parent after the last one.
void TraversalVerifier::decide() {
  std::deque<TraversalLevel>& levels = scratch_.levels;
  levels.clear();
  enter(kRoot, 1.0);
  for (;;) {
    TraversalLevel& level = levels.back();
    if (level.next_child != kNone) {
      const int64_t n = level.next_child, x = token(n);
      level.next_child = nodes_.next_siblings[n];
      level.tried = &tried_draft(level.residual, n, x);
      const DraftDistribution& draft = level.tried->draft;
      if (draft.invalid_at_token) {
        skip_children(level, kDraftInvalid);
      } else {
        enter(n, std::min(1.0, acceptance_ratio(level.residual, x, draft)));
      }
      continue;
    }
    if (level.node == kRoot || accepts(level)) break;
    levels.pop_back();
    subtract_child(levels.back());
  }
  for (size_t d = 1; d < levels.size(); ++d) {
    const Residual& residual = levels[d - 1].residual;
    const int64_t n = levels[d].node;
    accept(d - 1, n, residual.stats.logprob(residual.row, token(n)));
  }
  emit_next(levels.size() - 1, levels.back());
}

void TraversalVerifier::enter(int64_t node, double accept_prob) {
  const auto depth = static_cast<int64_t>(scratch_.levels.size());
  const bool ends = ends_at(depth, node);
  TreeStep step{depth, row_after(node), {}};
  if (!ends) step = measure_step(depth, node);
  TraversalLevel level{
      node, Residual(step.row, step.stats, accept_prob, nullptr, parallel_, scratch_.residual),
      accept_prob, kNone, nullptr};
  if (!ends && !step.stats.valid) level.status = kTargetInvalid;
  if (!ends && step.stats.valid && depth < p_.max_depth) {
    level.next_child = nodes_.first_child(node);
  }
  scratch_.levels.push_back(std::move(level));
}

// Once something was subtracted, the residual is normalised by its mass. Before, logits give the
// ratio through logarithms, which do not underflow.
double TraversalVerifier::acceptance_ratio(const Residual& residual, int64_t x,
                                           const DraftDistribution& draft) const {
  if (x >= p_.vocab) return 0;
  if (!residual.is_target()) {
    return probability_ratio(residual.at(x) / residual.mass, draft.q_x);
  }
  const double ratio = ratio_of_draft(residual.stats.direct, residual.row.at(x),
                                      residual.stats.logprob(residual.row, x), draft);
  return next_p_scale(residual.target_scale(), ratio);
}

// Every node has a uniform of its own at the first position: siblings and depths share none.
bool TraversalVerifier::accepts(const TraversalLevel& level) const {
  record_accept_prob(level.node, level.accept_prob);
  return accept_uniform(p_, state_, level.node, 0, level.node) < level.accept_prob;
}

void TraversalVerifier::subtract_child(TraversalLevel& level) {
  Residual& residual = level.residual;
  const Residual::Sums sums = residual.sums_after(*level.tried, residual.mass, true);
  if (!sums.valid) return skip_children(level, kDraftInvalid);
  if (!(sums.negative > 0)) return skip_children(level, kEmptyResidual);
  level.accept_prob = block_accept_prob(level.accept_prob, sums.positive, sums.negative);
  residual.subtract(*level.tried, residual.mass);
  residual.mass = sums.negative;
}

void TraversalVerifier::emit_next(int64_t depth, TraversalLevel& level) {
  if (ends_at(depth, level.node)) return;
  if (level.status == kTargetInvalid) {
    status_ |= target_fault(p_, state_, level.node + 1);
    return;
  }
  status_ |= level.status;
  Residual& residual = level.residual;
  int64_t y = residual.is_target() ? kNone : residual.draw(residual_uniform(p_, state_, depth));
  if (y < 0) {
    if (!residual.is_target()) status_ |= kEmptyResidual;
    const bool still_measured = measured_ == level.node;
    y = draw_target(still_measured ? TreeStep{depth, residual.row, residual.stats}
                                   : measure_step(depth, level.node));
  }
  write(depth, y, residual.stats.logprob(residual.row, y));
}

}  // namespace specdec::cpu
