#include "specdec/tree.h"

#include <algorithm>
#include <cmath>

#include "cpu/difference.h"
#include "cpu/tasks.h"
#include "cpu/tree_k_seq.h"
#include "cpu/tree_left.h"
#include "cpu/tree_view.h"

namespace specdec {
namespace {

// A node of the path that rule traversal is on.
struct Level {
  int64_t node;
  Left left;           // of what follows it
  double accepted;     // probability so far
  int64_t next;        // child to be judged
  Taken* judged;       // law of the child that is
  int32_t status = 0;  // if it is the last node that stands
};

struct Scratches {
  Scratch target, draft;
  std::vector<float> entropies;  // [tiles]
  LeftMemory left;
  Nodes nodes;
  std::vector<int64_t> members;   // nodes that spell the path so far
  std::vector<int64_t> children;  // of all of them
  std::vector<int64_t> distinct;  // the first of them with each token
  std::deque<Level> levels;
};

// Verdict on one sequence.
class Sequence : TreeView {
 public:
  Sequence(const TreeParams& p, int64_t b, const Parallel& parallel, Scratches& scratch)
      : TreeView(p, b, scratch.nodes), parallel_(parallel), scratch_(scratch) {}

  void verify() {
    clear();
    decide();
    p_.status[b_] = status_;
  }

 private:
  // One point of a walk: what has been accepted, and the row that judges what follows.
  struct Point {
    int64_t depth;
    RowView row;
    Law law;
  };

  void decide() {
    params_ = params_of(p_.sampling, b_);
    q_temperature_ = params_.temperature;
    if (p_.reads_draft() && p_.draft.form == DraftForm::kSampled) {
      q_temperature_ = p_.draft.temperatures ? p_.draft.temperatures[b_] : p_.draft.temperature;
    }
    if (!params_.valid() || !(std::isfinite(q_temperature_) && q_temperature_ >= 0)) {
      status_ = kBadParameter;
      return;
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
      return;
    }
    if (!read_nodes(rows - 1)) status_ |= kDraftOutOfRange;
    most_ = p_.max_emit != nullptr ? std::max<int64_t>(0, p_.max_emit[b_]) : rows;
    if (most_ == 0) return;
    if (p_.rule == TreeRule::kTraversal && !point_) {
      traverse();
    } else {
      walk();
    }
  }

  // Every rule that goes from the root down. Nodes whose tokens spell the same path are one.
  void walk() {
    std::vector<int64_t>&members = scratch_.members, &children = scratch_.children;
    members.assign(1, kRoot);
    int64_t here = kRoot;
    for (int64_t depth = 0; !over(depth, here); ++depth) {
      const Point point = measure_point(depth, here);
      if (!point.law.finite) {
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
      here = judge(point, y);
      if (here == kNone) {
        write(depth, y, point.law.logprob(point.row, y));
        return;
      }
      accept(depth, here, point.law.logprob(point.row, token(here)));
      members.clear();
      for (int64_t n : children) {
        if (token(n) == token(here)) members.push_back(n);
      }
    }
  }

  // The child that stands, or none and y, the token that follows.
  int64_t judge(const Point& point, int64_t& y) {
    if (point_) return answer(point, y);
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
  int64_t find(const std::vector<int64_t>& nodes, int64_t x) const {
    for (int64_t n : nodes) {
      if (token(n) == x) return n;
    }
    return kNone;
  }

  // The target says y, by its maximum, by shared noise or by a draw.
  int64_t answer(const Point& point, int64_t& y) {
    const bool drawn = !point_ && p_.rule == TreeRule::kTargetOnly;
    const RaceNoise noise = {seed(), position(point.depth), kSharedStream};
    y = drawn ? draw_target(point)
              : race(point.row, point.law, scratch_.target, noise, parallel_);
    for (int64_t n : distinct()) {
      chance(n, drawn ? std::exp(point.law.logprob(point.row, token(n))) : token(n) == y);
    }
    return find(scratch_.children, y);
  }

  int64_t typical(const Point& point, int64_t& y) {
    const double epsilon = p_.typical_epsilon;
    double bound = NAN, most = -1;  // the smaller bound needs the entropy: a pass over the row
    int64_t likeliest = kNone;
    for (int64_t n : distinct()) {
      const double p_x = std::exp(point.law.logprob(point.row, token(n)));
      if (p_x <= epsilon && p_x > 0 && std::isnan(bound)) {
        const double h = entropy(point.row, point.law, parallel_, scratch_.entropies);
        bound = p_.typical_delta * std::exp(-h);
      }
      const bool stands = p_x > epsilon || (p_x > 0 && p_x > bound);
      chance(n, stands);
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
              const DraftLaw& draft, double s) const {
    const double u = coin(node, point.depth, lane);
    const int64_t x = token(node);
    if (!left.untouched() || point.law.direct) {
      const double p_x = left.at(x), q_x = s * draft.q_x;
      chance(node, p_x == 0 ? 0 : p_x / q_x);
      return u * q_x < p_x;
    }
    const double log_p = x < p_.vocab ? point.law.logprob(point.row, x) : -INFINITY;
    const double log_q = std::log(s) + draft.log_q_x;
    chance(node, log_p == -INFINITY ? 0 : std::exp(std::min(0.0, log_p - log_q)));
    return std::log(u) < log_p - log_q;
  }

  // multi_draft and multi_draft_wor, whose later siblings' Q lacks the tokens before them.
  int64_t one_by_one(const Point& point, int64_t& y) {
    const bool replaced = p_.rule == TreeRule::kMultiDraft;
    Left left = whole(point);
    int64_t lane = -1;
    for (int64_t n : replaced ? scratch_.children : distinct()) {
      ++lane;
      const int64_t x = token(n);
      Taken& taken = law_of(left, n, x);
      const bool summed = !taken.draft.fault &&
                          taken.sum_rest(p_.vocab, parallel_, scratch_.left.mass);
      if (!summed) {
        status_ |= kDraftNotFinite;
        break;
      }
      if (!(taken.rest > 0)) continue;  // nothing was left to draw this one from
      const double s = left.mass / taken.rest;
      if (stands(point, left, n, lane, taken.draft, s)) return n;
      if (!replaced) left.remove(taken, x);
      const Left::Step step = left.weigh(taken, s, false);
      if (!step.lawful) {
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
      Taken& taken = law_of(left, last, token(last));
      scratch_.distinct.pop_back();
      for (int64_t n : top) taken.without.push_back(token(n));
      if (!top.empty()) taken.rest = NAN;
      const bool lawful =
          !taken.draft.fault && (top.empty() ? taken.draft.whole_row_lawful(parallel_)
                                             : taken.sum_rest(p_.vocab, parallel_, scratch_.left.mass));
      if (!lawful) {
        status_ |= kDraftNotFinite;
      } else if (taken.rest > 0) {
        const double s = 1 / taken.rest;
        if (stands(point, left, last, 0, taken.draft, s)) return last;
        left.mass = left.weigh(taken, s, false).more;
        left.take(taken, s);
      }
    }
    y = draw_left(point, left);
    if (left.untouched() || !(left.mass > 0)) left = whole(point);
    if (left.untouched() && point.law.direct) left.mass = total(scratch_.target.sums);
    for (int64_t n : top) chance(n, left.at(token(n)) / left.mass);
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
    DraftLaw draft = draft_of(children[0]);
    bool lawful = true;
    for (int64_t n : children) {
      draft.look_up(token(n));
      lawful = lawful && !draft.fault;
    }
    KSeq rule(point.row, point.law, listed(point.law), draft, parallel_, scratch_.left);
    if (!lawful || !rule.solve(siblings)) {
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

  // From the leaves to the root; of a node, its children one after the other against what it was
  // accepted with so far. On a chain it is rule block.
  void traverse() {
    std::deque<Level>& levels = scratch_.levels;
    levels.clear();
    open(kRoot, 1.0);
    for (;;) {
      Level& here = levels.back();
      if (here.next != kNone) {
        const int64_t n = here.next, x = token(n);
        here.next = nodes_.next[n];
        here.judged = &law_of(here.left, n, x);
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
      accept(d - 1, levels[d].node, left.law.logprob(left.row, token(levels[d].node)));
    }
    follow(levels.size() - 1, levels.back());
  }

  void open(int64_t node, double accepted) {
    const auto depth = static_cast<int64_t>(scratch_.levels.size());
    const bool last = over(depth, node);
    Point point{depth, target_row(node), {}};
    if (!last) point = measure_point(depth, node);
    Level level{node, Left(point.row, point.law, accepted, nullptr, parallel_, scratch_.left),
                accepted, kNone, nullptr};
    if (!last && !point.law.finite) level.status = kTargetNotFinite;
    if (!last && point.law.finite && depth < p_.max_depth) level.next = nodes_.first_child(node);
    scratch_.levels.push_back(std::move(level));
  }

  static void end(Level& level, int32_t status) {
    level.next = kNone;
    level.status = status;
  }

  // What is left is relative to the mass of it; of an untouched row without underflow.
  double ratio_of(const Left& left, int64_t x, const DraftLaw& draft) const {
    if (x >= p_.vocab) return 0;
    if (!left.untouched()) {
      const double p_x = left.at(x) / left.mass;
      return p_x > 0 ? p_x / draft.q_x : 0;
    }
    double ratio = 0;
    if (left.law.direct) {
      const double p_x = left.row.at(x);
      if (p_x > 0) ratio = p_x / draft.q_x;
    } else {
      const double log_p = left.law.logprob(left.row, x);
      if (log_p > -INFINITY) ratio = std::exp(log_p - draft.log_q_x);
    }
    return ratio > 0 && left.scale() > 0 ? left.scale() * ratio : 0;
  }

  bool accepted(const Level& level) const {
    chance(level.node, level.accepted);
    return coin(level.node, 0, level.node) < level.accepted;
  }

  // The child judged last and all below it failed.
  void subtract(Level& level) {
    Left& left = level.left;
    const Left::Step step = left.weigh(*level.judged, left.mass, true);
    if (!step.lawful) return end(level, kDraftNotFinite);
    if (!(step.less > 0)) return end(level, kEmptyResidual);
    level.accepted = std::min(1.0, step.more / step.less);
    left.take(*level.judged, left.mass);
    left.mass = step.less;
  }

  // The token after the last node that stands.
  void follow(int64_t depth, Level& level) {
    if (over(depth, level.node)) return;
    status_ |= level.status;
    if (level.status == kTargetNotFinite) return;
    int64_t y = level.left.untouched() ? kNone : level.left.draw(last(depth));
    if (y < 0) {
      if (!level.left.untouched()) status_ |= kEmptyResidual;
      const bool still = measured_ == level.node;  // no other row was measured since
      y = draw_target(still ? Point{depth, level.left.row, level.left.law}
                            : measure_point(depth, level.node));
    }
    write(depth, y, level.left.law.logprob(level.left.row, y));
  }

  Point measure_point(int64_t depth, int64_t node) {
    Point point{depth, target_row(node), {}};
    measured_ = node;
    if (p_.kind == Kind::kProbs && (direct_ || point_)) {
      point.law = measure_direct(point.row, parallel_, scratch_.target);
      if (direct_ || !point.law.finite) return point;
    }
    point.law = measure(point.row, params_, parallel_, scratch_.target);
    return point;
  }

  const Survivors* listed(const Law& law) const {
    return law.listed ? scratch_.target.survivors.get() : nullptr;
  }
  Left whole(const Point& point) {
    return Left(point.row, point.law, 1.0, listed(point.law), parallel_, scratch_.left);
  }

  // Of siblings with one row the law is read once.
  Taken& law_of(Left& left, int64_t node, int64_t x) {
    const bool certain = p_.draft.form == DraftForm::kPointMass || q_temperature_ == 0;
    Taken& taken = left.taken(certain ? x : law_row(node), [&] { return draft_of(node); });
    taken.draft.look_up(x);
    return taken;
  }
  DraftLaw draft_of(int64_t node) {
    const int64_t row = law_row(node);
    const int64_t statistic = p_.draft.flat ? row : b_ * p_.draft.num_rows + row;
    return draft_law(p_.draft, b_, row, statistic, token(node), q_temperature_, parallel_,
                     scratch_.draft);
  }

  int64_t draw_target(const Point& point) {
    const auto& [depth, row, law] = point;
    if (!law.direct) return draw(row, law, scratch_.target, last(depth));
    return draw(row, scratch_.target.sums, last(depth),
                [&](int64_t t, float* out) { target_weights(row, law, t, 1.0, out); });
  }
  // Y ~ what is left, or ~ P where nothing was taken or nothing is left.
  int64_t draw_left(const Point& point, Left& left) {
    if (left.untouched()) return draw_target(point);
    const int64_t y = left.mass > 0 ? left.draw(last(point.depth)) : kNone;
    if (y >= 0) return y;
    status_ |= kEmptyResidual;
    return draw_target(point);
  }

  const Parallel& parallel_;
  Scratches& scratch_;
  Params params_{};
  float q_temperature_ = 1;
  int32_t status_ = 0;
  int64_t measured_ = kRoot;  // node whose row scratch_.target is of
};

}  // namespace

void verify_tree_cpu(const TreeParams& p, const Parallel& parallel) {
  const int64_t work = p.batch * (p.max_depth + 1) * p.vocab;
  each_sequence<Scratches>(parallel, p.batch, work,
                           [&](int64_t b, const Parallel& inner, Scratches& scratch) {
                             Sequence(p, b, inner, scratch).verify();
                           });
}

}  // namespace specdec
