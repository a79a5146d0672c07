#include <algorithm>
#include <cmath>

#include "cpu/tasks.h"
#include "cpu/tree/k_seq.h"
#include "cpu/tree/sequence.h"
#include "specdec/tree.h"

namespace specdec::cpu {
namespace {

// Every rule that goes from the root down. Nodes whose tokens spell the same path are one.
class Walk final : public TreeSequence {
 public:
  using TreeSequence::TreeSequence;

 private:
  using Point = TreePoint;

  void judge() override {
    std::vector<int64_t>&members = scratch_.members, &children = scratch_.children;
    members.assign(1, kRoot);
    int64_t here = kRoot;
    for (int64_t depth = 0; !over(depth, here); ++depth) {
      const Point point = measure_point(depth, here);
      if (!point.stats.valid) {
        status_ |= kTargetNotFinite;
        return;
      }
      children.clear();
      for (int64_t m : members) {
        if (depth == p_.max_depth) break;
        for (int64_t n = nodes_.first_child(m); n >= 0; n = nodes_.next[n]) children.push_back(n);
      }
      std::sort(children.begin(), children.end());
      int64_t y = kNone;
      here = child_of(point, y);
      if (here == kNone) {
        write(depth, y, point.stats.logprob(point.row, y));
        return;
      }
      accept(depth, here, point.stats.logprob(point.row, token(here)));
      members.clear();
      for (int64_t n : children) {
        if (token(n) == token(here)) members.push_back(n);
      }
    }
  }

  // The child that stands, or none and y, the token that follows.
  int64_t child_of(const Point& point, int64_t& y) {
    if (state_.greedy) return answer(point, y);
    switch (p_.rule) {
      case TreeRule::kTypical:
        return typical(point, y);
      case TreeRule::kMultiDraft:
      case TreeRule::kMultiDraftWor:
        return one_by_one(point, y);
      case TreeRule::kTopKPlusOne:
        return top_k_plus_one(point, y);
      case TreeRule::kKSeq:
        return k_seq(point, y);
      default:
        return answer(point, y);
    }
  }

  // The first of the children with each token.
  const std::vector<int64_t>& distinct() {
    std::vector<int64_t>& kept = scratch_.distinct;
    kept.clear();
    for (int64_t n : scratch_.children) {
      if (find(kept, token(n)) == kNone) kept.push_back(n);
    }
    return kept;
  }
  // Of those of one parent and one law, which were drawn together.
  const std::vector<int64_t>& distinct_draws() {
    std::vector<int64_t>& kept = scratch_.distinct;
    kept.clear();
    for (int64_t n : scratch_.children) {
      const bool again = std::any_of(kept.begin(), kept.end(), [&](int64_t m) {
        return token(m) == token(n) && nodes_.parents[m] == nodes_.parents[n] &&
               draft_row(m) == draft_row(n);
      });
      if (!again) kept.push_back(n);
    }
    return kept;
  }
  int64_t find(const std::vector<int64_t>& nodes, int64_t x) const {
    for (int64_t n : nodes) {
      if (token(n) == x) return n;
    }
    return kNone;
  }

  // The target says y, by its maximum, by shared noise or by a draw.
  int64_t answer(const Point& point, int64_t& y) {
    const bool drawn = !state_.greedy && p_.rule == TreeRule::kTargetOnly;
    y = drawn ? draw_target(point)
              : gumbel_argmax(point.row, point.stats, scratch_.target, shared_noise(point.depth),
                              parallel_);
    for (int64_t n : distinct()) {
      record_accept_prob(n,
                         drawn ? std::exp(point.stats.logprob(point.row, token(n))) : token(n) == y);
    }
    return find(scratch_.children, y);
  }

  int64_t typical(const Point& point, int64_t& y) {
    const double epsilon = p_.typical_epsilon;
    double bound = NAN, most = -1;  // the smaller bound needs the entropy: a pass over the row
    int64_t likeliest = kNone;
    for (int64_t n : distinct()) {
      const double p_x = std::exp(point.stats.logprob(point.row, token(n)));
      if (typical_needs_entropy(p_x, epsilon) && std::isnan(bound)) {
        const double h = entropy(point.row, point.stats, parallel_, scratch_.entropies);
        bound = typical_bound(epsilon, p_.typical_delta, h);
      }
      const bool stands = p_x > epsilon || p_x > bound;
      record_accept_prob(n, stands);
      if (!stands || p_x <= most) continue;
      most = p_x;
      likeliest = n;
    }
    if (likeliest == kNone) y = draw_target(point);
    return likeliest;
  }

  // u * s * Q(x) < P(x), strict, with what is left for P. Of an untouched row as verify_chain
  // compares: probabilities as they are, of logits the difference.
  bool stands(const Point& point, const Left& left, int64_t node, int64_t lane,
              const DraftDistribution& draft, double s) const {
    const double u = accept_uniform(node, point.depth, lane);
    const int64_t x = token(node);
    if (!left.untouched() || point.stats.direct) {
      return decide(node, accept_ratio(u, left.at(x), s * draft.q_x));
    }
    const double log_p = x < p_.vocab ? point.stats.logprob(point.row, x) : -INFINITY;
    return decide(node, accept_log_ratio(u, log_p, std::log(s) + draft.log_q_x));
  }

  bool decide(int64_t node, const Acceptance& a) const {
    record_accept_prob(node, a.probability);
    return a.accepted;
  }

  // multi_draft and multi_draft_wor, whose later siblings' Q lacks the tokens before them.
  int64_t one_by_one(const Point& point, int64_t& y) {
    const bool replaced = p_.rule == TreeRule::kMultiDraft;
    Left left = whole(point);
    int64_t lane = -1;
    for (int64_t n : replaced ? scratch_.children : distinct_draws()) {
      ++lane;
      const int64_t x = token(n);
      Taken& taken = taken_of(left, n, x);
      const bool summed =
          !taken.draft.fault && taken.sum_rest(p_.vocab, parallel_, scratch_.left.mass);
      if (!summed) {
        status_ |= kDraftNotFinite;
        break;
      }
      if (!(taken.rest > kLeastRest)) continue;  // nothing was left to draw this one from
      const double s = left.mass / taken.rest;
      if (stands(point, left, n, lane, taken.draft, s)) return n;
      if (!replaced) left.remove(taken, x);
      const Left::Step step = left.weigh(taken, s, false);
      if (!step.valid) {
        if (!replaced) left.restore(taken);
        status_ |= kDraftNotFinite;
        break;
      }
      left.take(taken, s);
      left.mass = step.more;
      if (!(left.mass > 0)) break;
    }
    y = draw_left(point, left);
    return kNone;
  }

  // The last child was drawn from Q off the others, which are the top of Q.
  int64_t top_k_plus_one(const Point& point, int64_t& y) {
    Left left = whole(point);
    const std::vector<int64_t>& top = distinct();
    const int64_t last = scratch_.children.empty() ? kNone : scratch_.children.back();
    const bool tried = !top.empty() && top.back() == last;
    if (tried) {
      Taken& taken = taken_of(left, last, token(last));
      scratch_.distinct.pop_back();
      for (int64_t n : top) taken.without.push_back(token(n));
      if (!top.empty()) taken.rest = NAN;
      const bool valid = !taken.draft.fault &&
                         (top.empty() ? taken.draft.whole_row_valid(parallel_)
                                      : taken.sum_rest(p_.vocab, parallel_, scratch_.left.mass));
      if (!valid) {
        status_ |= kDraftNotFinite;
      } else if (taken.rest > kLeastRest) {
        const double s = 1 / taken.rest;
        if (stands(point, left, last, 0, taken.draft, s)) return last;
        left.mass = left.weigh(taken, s, false).more;
        left.take(taken, s);
      }
    }
    y = draw_left(point, left);
    if (left.untouched() || !(left.mass > 0)) left = whole(point);
    if (left.untouched() && point.stats.direct) left.mass = total(scratch_.target.sums);
    for (int64_t n : top) record_accept_prob(n, left.at(token(n)) / left.mass);
    return find(top, y);
  }

  // Each child is tried against P and the law of the first (Sun et al. 2023).
  int64_t k_seq(const Point& point, int64_t& y) {
    const std::vector<int64_t>& children = scratch_.children;
    if (children.empty()) {
      y = draw_target(point);
      return kNone;
    }
    const auto siblings = static_cast<int64_t>(children.size());
    const Left left = whole(point);
    DraftDistribution draft = draft_of(children[0]);
    bool valid = true;
    for (int64_t n : children) {
      draft.look_up(token(n));
      valid = valid && !draft.fault;
    }
    KSeq rule(point.row, point.stats, listed(point.stats), draft, parallel_, scratch_.left);
    if (!valid || !rule.solve(siblings)) {
      status_ |= kDraftNotFinite;
      y = draw_target(point);
      return kNone;
    }
    for (int64_t k = 0; k < siblings; ++k) {
      draft.look_up(token(children[k]));
      if (stands(point, left, children[k], k, draft, rule.rho())) return children[k];
    }
    y = rule.draw(last(point.depth));
    if (y < 0) {
      status_ |= kEmptyResidual;
      y = draw_target(point);
    }
    return kNone;
  }

  const Survivors* listed(const RowStats& stats) const {
    return stats.listed ? scratch_.target.survivors.get() : nullptr;
  }
  Left whole(const Point& point) {
    return Left(point.row, point.stats, 1.0, listed(point.stats), parallel_, scratch_.left);
  }

  // Y ~ what is left, or ~ P where nothing was taken or nothing is left.
  int64_t draw_left(const Point& point, Left& left) {
    if (left.untouched()) return draw_target(point);
    const int64_t y = left.mass > 0 ? left.draw(last(point.depth)) : kNone;
    if (y >= 0) return y;
    status_ |= kEmptyResidual;
    return draw_target(point);
  }
};

}  // namespace

void verify_tree(const TreeParams& p, const Parallel& parallel) {
  const int64_t work = p.batch * (p.max_depth + 1) * p.vocab;
  each_sequence<TreeScratch>(
      parallel, p.batch, work, [&](int64_t b, const Parallel& inner, TreeScratch& scratch) {
        const bool cold = params_of(p.sampling, b).temperature == 0;  // greedy
        if (p.rule == TreeRule::kTraversal && !cold) {
          Traversal(p, b, inner, scratch).verify();
        } else {
          Walk(p, b, inner, scratch).verify();
        }
      });
}

}  // namespace specdec::cpu
