#pragma once
// The rules that walk from the root down; specdec_kernels/reference/tree.py says the same in one
// piece.
#include "cuda/tree_point.cuh"

namespace specdec {

class TreeWalkJudge : public TreePoint {
 public:
  using TreePoint::TreePoint;

  __forceinline__ __device__ void begin() { arrive(kNone, 0); }

  // After the action.
  __forceinline__ __device__ void go_on() {
    switch (t_.state) {
      case TreeState::kArrived:
        return judge_point();
      case TreeState::kAnswer:
        return drawn();
      case TreeState::kSurveyed:
        return surveyed();
      case TreeState::kEntropy:
        return judge_typical();
      case TreeState::kCandidate:
        return judge_candidate();
      case TreeState::kLeft:
        return judge_left();
      case TreeState::kSubtract:
        return subtracted();
      case TreeState::kRest:
        return judge_last();
      case TreeState::kFactor:
        return narrow();
      default:
        return draw(true);
    }
  }

 private:
  __forceinline__ __device__ bool without_replacement() const {
    return p_.rule == TreeRule::kMultiDraftWor;
  }
  __forceinline__ __device__ bool top() const { return p_.rule == TreeRule::kTopKPlusOne; }

  __forceinline__ __device__ void arrive(int64_t node, int64_t depth) {
    t_.here = node;
    t_.depth = depth;
    t_.accepted = static_cast<int32_t>(depth);
    if (over()) return finish();
    t_.gathers = depth < p_.max_depth;
    t_.num_children = 0;
    t_.child = t_.lane = t_.but = -1;
    t_.c = t_.mass = t_.bound = 1;
    t_.num_tried = 0;
    t_.scan = Scan::kLeft;
    t_.has_draft = false;
    remove_all();
    fill_target();
    measure(TreeState::kArrived);
  }

  __forceinline__ __device__ void stand(int64_t node) {
    t_.x = tree_token(p_, t_.b, node);
    write(t_.depth, node, t_.x, target_logprob(t_.x));
    arrive(node, t_.depth + 1);
  }

  __forceinline__ __device__ void judge_point() {
    if (!t_.law.sound) {
      t_.status |= kTargetNotFinite;
      return finish();
    }
    t_.measures = t_.gathers = false;
    if (t_.point || p_.rule == TreeRule::kMatch) return survey();
    if (t_.num_children == 0 || p_.rule == TreeRule::kTargetOnly) return draw(false);
    if (p_.rule == TreeRule::kTypical) return scan(Scan::kEntropy, TreeState::kEntropy);
    if (top()) return try_last();
    if (p_.rule == TreeRule::kKSeq) return candidate(next(-1, false));
    next_trial();
  }

  __forceinline__ __device__ void survey() {
    if (t_.num_children == 0) return end(t_.token);
    t_.state = TreeState::kSurveyed;
    t_.action = TreeAction::kSurvey;
  }

  __forceinline__ __device__ void surveyed() {
    if (t_.child >= 0) return stand(t_.child);
    p_.rule == TreeRule::kTypical && !t_.point ? draw(false) : end(t_.token);
  }

  __forceinline__ __device__ void drawn() {
    if (!top() && p_.rule != TreeRule::kTargetOnly) return end(t_.token);
    // Of the weights that were drawn from; those of the top are P's.
    t_.bound = t_.residual ? t_.more : top() && t_.direct ? exp(t_.law.log_sum) : 1.0;
    survey();
  }

  __forceinline__ __device__ void judge_typical() {
    const double entropy = t_.law.log_sum + t_.law.inv_t * t_.more * exp(-t_.law.log_sum);
    t_.bound = fmin(static_cast<double>(p_.typical_epsilon), p_.typical_delta * exp(-entropy));
    t_.state = TreeState::kSurveyed;
    t_.action = TreeAction::kSurvey;
  }

  __forceinline__ __device__ void candidate(int64_t n) {
    t_.child = n;
    t_.x = tree_token(p_, t_.b, n);
    ++t_.lane;
    open(n, t_.x);
    asks() ? measure(TreeState::kCandidate) : judge_candidate();
  }

  __forceinline__ __device__ void judge_candidate() {
    if (p_.rule == TreeRule::kKSeq) return t_.first < 0 ? find_factor() : judge_drawn();
    if (t_.draft.fault) return give_up();
    if (top()) {
      append(t_.child, 1);
      return scan(Scan::kRest, TreeState::kRest);
    }
    if (t_.first < 0) return accepts(1) ? stand(t_.child) : reject();
    if (t_.x < p_.vocab) return look(TreeState::kLeft);
    t_.left = 0;
    judge_left();
  }

  // multi_draft and multi_draft_wor: one by one.
  __forceinline__ __device__ void next_trial() {
    int64_t n = t_.child;
    for (;;) {
      n = next(n, without_replacement());
      if (n < 0) return t_.first < 0 ? draw(false) : draw(true);
      t_.rest = 1;
      if (!without_replacement() || t_.first < 0) break;
      const int32_t twin = twin_of(n);
      if (twin >= 0) t_.rest = t_.records[twin].rest;
      if (t_.rest > 0) break;
      ++t_.lane;  // nothing was left to draw this one from
    }
    candidate(n);
  }

  __forceinline__ __device__ void judge_left() {
    const double q_x = t_.mass * t_.draft.q_x / t_.rest;
    chance(t_.child, t_.left == 0 ? 0 : q_x > 0 ? t_.left / q_x : 1);
    const bool stands = coin(t_.position + t_.depth, t_.lane) * q_x < t_.left;
    stands ? stand(t_.child) : reject();
  }

  __forceinline__ __device__ void reject() {
    append(t_.child, t_.mass / t_.rest);
    if (!without_replacement()) return scan(Scan::kLeft, TreeState::kSubtract);
    t_.tried[t_.num_tried++] = {t_.x, t_.child};
    scan(Scan::kOff, TreeState::kSubtract);
  }

  __forceinline__ __device__ void subtracted() {
    if (!t_.lawful) {
      remove_last();
      if (without_replacement()) --t_.num_tried;
      t_.status |= kDraftNotFinite;
      return t_.first < 0 ? draw(false) : scan(t_.scan, TreeState::kAgain);
    }
    if (!(t_.more > 0)) {
      t_.status |= kEmptyResidual;
      return draw(false);
    }
    if (top() || p_.rule == TreeRule::kKSeq) return draw(true);
    t_.mass = t_.more;
    t_.records[t_.child].rest = t_.second;
    next_trial();
  }

  // A candidate whose law cannot be read: what is left is drawn from.
  __forceinline__ __device__ void give_up() {
    t_.status |= kDraftNotFinite;
    draw(t_.first >= 0);
  }

  // top_k_plus_one: the last candidate was drawn off the tokens of the others.
  __forceinline__ __device__ void try_last() {
    int64_t last = -1;
    for (int64_t n = next(-1, false); n >= 0; n = next(n, false)) last = n;
    const int64_t x = tree_token(p_, t_.b, last);
    bool among = false;
    for (int64_t n = next(-1, true); n >= 0; n = next(n, true)) {
      if (n == last) continue;
      const int64_t token = tree_token(p_, t_.b, n);
      t_.tried[t_.num_tried++] = {token, last};
      among |= token == x;
    }
    if (among) return draw(false);
    t_.but = last;
    candidate(last);
  }

  __forceinline__ __device__ void judge_last() {
    const double rest = t_.num_tried == 0 ? 1.0 : t_.second;
    remove_all();
    if (!t_.lawful) return give_up();
    if (!(rest > 0)) return draw(false);
    if (accepts(1 / rest)) return stand(t_.child);
    append(t_.child, 1 / rest);
    scan(Scan::kOff, TreeState::kSubtract);
  }

  // k_seq: the smallest factor of Q with which every candidate may be tried against P.
  __forceinline__ __device__ void find_factor() {
    if (t_.draft.fault) return give_up();
    append(t_.child, 1);
    const auto k = static_cast<double>(t_.num_children);
    t_.low = 1;
    t_.high = k;
    t_.passes = 0;
    ask_factors(1, 1 + (k - 1) / 8, 1 + (k - 1) / 2, k);
  }

  __forceinline__ __device__ void ask_factors(double a, double b, double c, double d) {
    t_.rho[0] = a;
    t_.rho[1] = b;
    t_.rho[2] = c;
    t_.rho[3] = d;
    scan(Scan::kFactors, TreeState::kFactor);
  }

  // Probability that one of k trials stands.
  __forceinline__ __device__ double hit(double beta) const {
    return -expm1(static_cast<double>(t_.num_children) * log1p(-beta));
  }

  // The smallest factor that is large enough lies in (low, high]; high always is. Four more are
  // looked at in each pass: two around the root of the secant, two between them and the ends.
  __forceinline__ __device__ void narrow() {
    if (!t_.lawful) {
      remove_all();
      return give_up();
    }
    const auto k = static_cast<double>(t_.num_children);
    for (int i = 0; i < kFactorsAtOnce; ++i) {
      const double rho = t_.rho[i], beta = t_.accepted_at[i], gap = rho * beta - hit(beta);
      if (gap >= 0 || rho >= k) {
        t_.high = rho;
        t_.high_gap = gap;
        t_.beta = beta;
        break;
      }
      t_.low = rho;
      t_.low_gap = gap;
    }
    const double width = t_.high - t_.low;
    if (t_.high == 1 || width <= 5e-7 || ++t_.passes == 40) return begin_trials();
    const double slope = t_.high_gap - t_.low_gap;
    const double root = t_.low + (slope > 0 ? width * -t_.low_gap / slope : width / 2);
    const double near = fmax(width * fmin(0.03125, width), 1e-7);
    const double a = fmax(root - near, t_.low), b = fmin(root + near, t_.high);
    ask_factors((t_.low + a) / 2, a, b, (b + t_.high) / 2);
  }

  __forceinline__ __device__ void begin_trials() {
    t_.child = t_.lane = -1;
    try_drawn();
  }

  __forceinline__ __device__ void try_drawn() {
    for (;;) {
      const int64_t n = next(t_.child, false);
      if (n < 0) return leave_accepted();
      t_.child = n;
      t_.x = tree_token(p_, t_.b, n);
      ++t_.lane;
      open_draft(p_, t_, t_.first, t_.x, t_.draft);
      if (t_.draft.unmeasured()) reuse(t_.first);
      if (asks()) return measure(TreeState::kCandidate);
      if (accepts(t_.high)) return stand(n);
    }
  }

  __forceinline__ __device__ void judge_drawn() {
    accepts(t_.high) ? stand(t_.child) : try_drawn();
  }

  __forceinline__ __device__ void leave_accepted() {
    const double part = t_.num_children == 1 ? 1 : t_.beta > 0 ? hit(t_.beta) / t_.beta : 0;
    t_.records[t_.first].scale = static_cast<float>(part);
    scan(Scan::kAccepted, TreeState::kSubtract);
  }
};

}  // namespace specdec
