#pragma once
// The rules that walk from the root down; specdec_kernels/reference/tree.py says the same in one
// piece.
#include "cuda/tree/verifier.cuh"

namespace specdec::cuda {

class TreeWalkJudge : public TreePoint {
 public:
  using TreePoint::TreePoint;

  __forceinline__ __device__ void begin() {
    t_.here = kNone;
    t_.depth = 0;
    t_.state = TreeState::kEnter;
    go_on();
  }

  // After the action.
  __forceinline__ __device__ void go_on() {
    do {
      t_.action = TreeAction::kThink;
      step();
    } while (t_.action == TreeAction::kThink);
  }

 private:
  __forceinline__ __device__ void step() {
    switch (t_.state) {
      case TreeState::kEnter:
        return arrive();
      case TreeState::kArrived:
        return judge_point();
      case TreeState::kNext:
        return next_trial();
      case TreeState::kOpen:
        open(k_seq() ? t_.first : kNone);
        return measure_draft(TreeState::kCandidate);
      case TreeState::kCandidate:
        return judge_candidate();
      case TreeState::kVerdict:
        return think(accepts(t_.factor) ? TreeState::kStand : TreeState::kReject);
      case TreeState::kLeft:
        return judge_left();
      case TreeState::kReject:
        return reject();
      case TreeState::kStand:
        return stand();
      case TreeState::kSubtract:
        return subtracted();
      case TreeState::kRest:
        return judge_last();
      case TreeState::kFactor:
        return narrow();
      case TreeState::kEntropy:
        return judge_typical();
      case TreeState::kSurveyed:
        return surveyed();
      case TreeState::kAnswer:
        return drawn();
      case TreeState::kEnd:
        return end(t_.token);
      default:
        return draw(true);
    }
  }

  __forceinline__ __device__ bool without_replacement() const {
    return p_.rule == TreeRule::kMultiDraftWor;
  }
  __forceinline__ __device__ bool k_seq() const { return p_.rule == TreeRule::kKSeq; }
  __forceinline__ __device__ bool top() const { return p_.rule == TreeRule::kTopKPlusOne; }

  __forceinline__ __device__ void arrive() {
    t_.accepted = static_cast<int32_t>(t_.depth);
    if (over()) return finish();
    t_.gathers = t_.depth < p_.max_depth;
    t_.num_children = 0;
    t_.child = t_.lane = t_.but = -1;
    t_.c = t_.mass = t_.bound = 1;
    t_.num_tried = 0;
    t_.scan = Scan::kLeft;
    remove_all();
    measure_target(TreeState::kArrived);
  }

  __forceinline__ __device__ void stand() {
    t_.x = p_.drafted(t_.b, t_.child);
    write(t_.depth, t_.child, t_.x, target_logprob(t_.x));
    t_.here = t_.child;
    ++t_.depth;
    think(TreeState::kEnter);
  }

  __forceinline__ __device__ void judge_point() {
    if (!t_.stats.valid) {
      t_.status |= kTargetNotFinite;
      return finish();
    }
    t_.gathers = false;
    if (t_.greedy || p_.rule == TreeRule::kMatch) return survey();
    if (t_.num_children == 0 || p_.rule == TreeRule::kTargetOnly) return draw(false);
    if (p_.rule == TreeRule::kTypical) return scan(Scan::kEntropy, TreeState::kEntropy);
    if (top()) return try_last();
    if (k_seq()) return candidate(next(-1, false));
    think(TreeState::kNext);
  }

  __forceinline__ __device__ void survey() {
    if (t_.num_children == 0) return think(TreeState::kEnd);
    t_.state = TreeState::kSurveyed;
    t_.action = TreeAction::kSurvey;
  }

  __forceinline__ __device__ void surveyed() {
    if (t_.child >= 0) return think(TreeState::kStand);
    p_.rule == TreeRule::kTypical && !t_.greedy ? draw(false) : think(TreeState::kEnd);
  }

  __forceinline__ __device__ void drawn() {
    if (!top() && p_.rule != TreeRule::kTargetOnly) return think(TreeState::kEnd);
    // Of the weights that were drawn from; those of the top are P's.
    t_.bound = t_.residual ? t_.more : top() && t_.direct ? exp(t_.stats.log_sum) : 1.0;
    survey();
  }

  __forceinline__ __device__ void judge_typical() {
    const double entropy = t_.stats.log_sum + t_.stats.inv_t * t_.more * exp(-t_.stats.log_sum);
    t_.bound = typical_bound(p_.typical_epsilon, p_.typical_delta, entropy);
    t_.state = TreeState::kSurveyed;
    t_.action = TreeAction::kSurvey;
  }

  __forceinline__ __device__ void candidate(int64_t n) {
    t_.child = n;
    ++t_.lane;
    think(TreeState::kOpen);
  }

  __forceinline__ __device__ void judge_candidate() {
    t_.factor = k_seq() ? t_.high : 1.0;
    if (k_seq() && t_.first >= 0) return think(TreeState::kVerdict);
    if (t_.draft.fault) return give_up();
    if (k_seq()) return find_factor();
    if (top()) {
      append(t_.child, 1);
      return scan(Scan::kRest, TreeState::kRest);
    }
    if (t_.first < 0) return think(TreeState::kVerdict);
    if (t_.x < p_.vocab) return look(TreeState::kLeft);
    t_.left = 0;
    think(TreeState::kLeft);
  }

  // The next candidate that is tried.
  __forceinline__ __device__ void next_trial() {
    int64_t n = t_.child;
    for (;;) {
      n = next(n, without_replacement());
      if (n < 0) return k_seq() ? leave_accepted() : draw(t_.first >= 0);
      t_.rest = 1;
      if (!without_replacement() || t_.first < 0) break;
      const int32_t twin = twin_of(n);
      if (twin >= 0) t_.rest = t_.records[twin].rest;
      if (t_.rest > kLeastRest) break;
      ++t_.lane;  // nothing was left to draw this one from
    }
    candidate(n);
  }

  __forceinline__ __device__ void judge_left() {
    const double q_x = t_.mass * t_.draft.q_x / t_.rest;
    const double u = accept_uniform(p_, t_, t_.child, t_.depth, t_.lane);
    think(decide(accept_ratio(u, t_.left, q_x)) ? TreeState::kStand : TreeState::kReject);
  }

  __forceinline__ __device__ void reject() {
    if (k_seq()) return think(TreeState::kNext);
    append(t_.child, top() ? t_.factor : t_.mass / t_.rest);
    if (without_replacement()) t_.tried[t_.num_tried++] = {t_.x, t_.child};
    const bool off = top() || without_replacement();
    scan(off ? Scan::kOff : Scan::kLeft, TreeState::kSubtract);
  }

  __forceinline__ __device__ void subtracted() {
    if (!t_.valid) {
      remove_last();
      if (without_replacement()) --t_.num_tried;
      t_.status |= kDraftNotFinite;
      return t_.first < 0 ? draw(false) : scan(t_.scan, TreeState::kAgain);
    }
    if (!(t_.more > 0)) {
      t_.status |= kEmptyResidual;
      return draw(false);
    }
    if (top() || k_seq()) return draw(true);
    t_.mass = t_.more;
    t_.records[t_.child].rest = t_.second;
    think(TreeState::kNext);
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
    const int64_t x = p_.drafted(t_.b, last);
    bool among = false;
    for (int64_t n = next(-1, true); n >= 0; n = next(n, true)) {
      if (n == last) continue;
      const int64_t token = p_.drafted(t_.b, n);
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
    if (!t_.valid) return give_up();
    if (!(rest > kLeastRest)) return draw(false);
    t_.factor = 1 / rest;
    think(TreeState::kVerdict);
  }

  // k_seq: the smallest factor of Q with which every candidate may be tried against P.
  __forceinline__ __device__ void find_factor() {
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
    return any_sibling_accepted(beta, t_.num_children);
  }

  // The smallest factor that is large enough lies in (low, high]; high always is. Four more are
  // looked at in each pass: two around the root of the secant, two between them and the ends.
  __forceinline__ __device__ void narrow() {
    if (!t_.valid) {
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
    think(TreeState::kNext);
  }

  __forceinline__ __device__ void leave_accepted() {
    const double part = t_.num_children == 1 ? 1 : t_.beta > 0 ? hit(t_.beta) / t_.beta : 0;
    t_.records[t_.first].scale = static_cast<float>(part);
    scan(Scan::kAccepted, TreeState::kSubtract);
  }
};

}  // namespace specdec::cuda
