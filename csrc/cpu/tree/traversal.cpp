#include <algorithm>
#include <cmath>

#include "cpu/tree/sequence.h"

namespace specdec::cpu {
namespace {

void end(Level& level, int32_t status) {
  level.next = kNone;
  level.status = status;
}

}  // namespace

// From the leaves to the root; of a node, its children one after the other against what it was
// accepted with so far. On a chain it is rule block.
void Traversal::judge() {
  std::deque<Level>& levels = scratch_.levels;
  levels.clear();
  open(kRoot, 1.0);
  for (;;) {
    Level& here = levels.back();
    if (here.next != kNone) {
      const int64_t n = here.next, x = token(n);
      here.next = nodes_.next[n];
      here.judged = &taken_of(here.left, n, x);
      if (here.judged->draft.fault) {
        end(here, kDraftNotFinite);
      } else {
        open(n, std::min(1.0, ratio_of(here.left, x, here.judged->draft)));
      }
      continue;
    }
    if (here.node == kRoot || accepted(here)) break;
    levels.pop_back();
    subtract(levels.back());
  }
  for (size_t d = 1; d < levels.size(); ++d) {
    const Left& left = levels[d - 1].left;
    accept(d - 1, levels[d].node, left.stats.logprob(left.row, token(levels[d].node)));
  }
  follow(levels.size() - 1, levels.back());
}

void Traversal::open(int64_t node, double accepted) {
  const auto depth = static_cast<int64_t>(scratch_.levels.size());
  const bool last = over(depth, node);
  TreePoint point{depth, row_after(node), {}};
  if (!last) point = measure_point(depth, node);
  Level level{node, Left(point.row, point.stats, accepted, nullptr, parallel_, scratch_.left),
              accepted, kNone, nullptr};
  if (!last && !point.stats.valid) level.status = kTargetNotFinite;
  if (!last && point.stats.valid && depth < p_.max_depth) level.next = nodes_.first_child(node);
  scratch_.levels.push_back(std::move(level));
}

// What is left is relative to the mass of it; of an untouched row without underflow.
double Traversal::ratio_of(const Left& left, int64_t x, const DraftDistribution& draft) const {
  if (x >= p_.vocab) return 0;
  if (!left.untouched()) {
    return probability_ratio(left.at(x) / left.mass, draft.q_x);
  }
  const double ratio =
      left.stats.direct
          ? probability_ratio(left.row.at(x), draft.q_x)
          : probability_ratio_of_logs(left.stats.logprob(left.row, x), draft.log_q_x);
  return next_carried(left.scale(), ratio);
}

bool Traversal::accepted(const Level& level) const {
  record_accept_prob(level.node, level.accepted);
  return accept_uniform(level.node, 0, level.node) < level.accepted;
}

// The child judged last and all below it failed.
void Traversal::subtract(Level& level) {
  Left& left = level.left;
  const Left::Step step = left.weigh(*level.judged, left.mass, true);
  if (!step.valid) return end(level, kDraftNotFinite);
  if (!(step.less > 0)) return end(level, kEmptyResidual);
  level.accepted = block_accept_prob(level.accepted, step.more, step.less);
  left.take(*level.judged, left.mass);
  left.mass = step.less;
}

// The token after the last node that stands.
void Traversal::follow(int64_t depth, Level& level) {
  if (over(depth, level.node)) return;
  status_ |= level.status;
  if (level.status == kTargetNotFinite) return;
  int64_t y = level.left.untouched() ? kNone : level.left.draw(last(depth));
  if (y < 0) {
    if (!level.left.untouched()) status_ |= kEmptyResidual;
    const bool still = measured_ == level.node;  // no other row was measured since
    y = draw_target(still ? TreePoint{depth, level.left.row, level.left.stats}
                          : measure_point(depth, level.node));
  }
  write(depth, y, level.left.stats.logprob(level.left.row, y));
}

}  // namespace specdec::cpu
