#pragma once
// Rule traversal: from the leaves to the root, in the order in which nodes come. On a chain it says
// what rule block of verify_chain says, to the bit.
#include "cuda/tree_point.cuh"

namespace specdec {

class TreeVisitJudge : public TreePoint {
 public:
  using TreePoint::TreePoint;

  __forceinline__ __device__ void begin() {
    t_.depth = 0;
    t_.num_tried = 0;
    t_.gathers = t_.measures = t_.has_draft = false;
    enter(kNone, 1);
  }

  // After the action.
  __forceinline__ __device__ void go_on() {
    switch (t_.state) {
      case TreeState::kVisit:
        return t_.child < 0 ? settle() : try_child();
      case TreeState::kCandidate:
        return measured();
      case TreeState::kLeft:
        return descend(t_.left / t_.mass, t_.draft.q_x);
      case TreeState::kBack:
        return judge_back();
      case TreeState::kAgain:
        return draw_left();
      case TreeState::kWhole:
        return draw_whole();
      default:
        return end(t_.token);
    }
  }

 private:
  // Of the row behind a node.
  __forceinline__ __device__ TreeRecord& behind(int64_t node) const {
    return t_.records[node < 0 ? p_.nodes : node];
  }

  // A node that was accepted so far with probability c.
  __forceinline__ __device__ void enter(int64_t node, double c) {
    t_.here = node;
    t_.child = kNone;
    t_.known = false;
    TreeRecord& r = behind(node);
    r.c = r.stands = c;
    r.mass = 1;
    r.first = r.last = kNone;
    r.status = 0;
    r.measured = false;
    r.over = over();
    if (r.over || t_.depth >= p_.max_depth) return settle();
    seek();
  }

  __forceinline__ __device__ void seek() {
    t_.state = TreeState::kVisit;
    t_.action = TreeAction::kSeek;
  }

  // The row at hand again, and what of it is left.
  __forceinline__ __device__ void restore() {
    const TreeRecord& r = behind(t_.here);
    take_row();
    t_.law = r.law;
    t_.c = r.c;
    t_.mass = r.mass;
    t_.first = r.first;
    t_.last = r.last;
    t_.scan = Scan::kLeft;
  }

  __forceinline__ __device__ void try_child() {
    restore();
    t_.x = tree_token(p_, t_.b, t_.child);
    open(t_.child, t_.x);
    t_.measures = !behind(t_.here).measured;
    if (t_.measures) fill_target();
    t_.measures || asks() ? measure(TreeState::kCandidate) : judge_child();
  }

  __forceinline__ __device__ void measured() {
    TreeRecord& r = behind(t_.here);
    if (t_.measures && !t_.law.sound) {
      r.status = kTargetNotFinite;
      return settle();
    }
    if (t_.measures) r.law = t_.law;
    t_.measures = false;
    r.measured = true;
    judge_child();
  }

  __forceinline__ __device__ void judge_child() {
    if (t_.draft.fault) {
      behind(t_.here).status = kDraftNotFinite;
      return settle();
    }
    TreeRecord& r = keep_draft(t_.child);
    r.logprob = target_logprob(t_.x);
    if (t_.first >= 0 && t_.x < p_.vocab) return look(TreeState::kLeft);
    // P(x) / Q(x): of probabilities as they are, so that a tie is a tie; of logits without
    // underflow.
    double ratio = 0;
    if (t_.first < 0 && t_.x < p_.vocab && r.logprob > -INFINITY) {
      ratio = t_.direct ? static_cast<double>(at(t_.row, t_.x)) / t_.draft.q_x
                        : exp(r.logprob - t_.draft.log_q_x);
    }
    visit(ratio > 0 && t_.c > 0 ? fmin(1.0, t_.c * ratio) : 0);
  }

  __forceinline__ __device__ void descend(double p_x, double q_x) {
    visit(p_x > 0 ? q_x > 0 ? fmin(1.0, p_x / q_x) : 1.0 : 0.0);
  }

  __forceinline__ __device__ void visit(double c) {
    const int64_t child = t_.child;
    behind(child).parent = t_.here;
    ++t_.depth;
    enter(child, c);
  }

  // Whether the node at hand stands; else what is left behind its parent is told.
  __forceinline__ __device__ void settle() {
    if (t_.here >= 0) {
      t_.child = t_.here;
      const double h = behind(t_.here).stands;
      chance(t_.here, h);
      if (!(coin(t_.position, t_.here) < h)) return go_back();
    }
    accept();
  }

  __forceinline__ __device__ void go_back() {
    t_.here = behind(t_.child).parent;
    --t_.depth;
    restore();
    t_.draft = t_.records[t_.child].draft;
    t_.q_law = t_.records[t_.child].q_law;
    append(t_.child, t_.mass);
    scan(Scan::kLeft, TreeState::kBack);
    t_.known = t_.direct || !t_.draft.few() || t_.first != t_.last;
    if (!t_.known) t_.action = TreeAction::kFew;
  }

  __forceinline__ __device__ void judge_back() {
    TreeRecord& r = behind(t_.here);
    const bool ends = !t_.lawful || !(t_.second > 0);
    if (ends && (!t_.lawful || t_.first != t_.last)) {
      r.status = t_.lawful ? kEmptyResidual : kDraftNotFinite;
      t_.known = false;
      remove_last();
    } else if (!ends) {
      r.stands = fmin(1.0, t_.more / t_.second);
      r.mass = t_.second;
    }
    r.first = t_.first;
    r.last = t_.last;
    ends ? settle() : seek();
  }

  // The path to the node at hand, and one token more.
  __forceinline__ __device__ void accept() {
    const TreeRecord& r = behind(t_.here);
    t_.accepted = static_cast<int32_t>(t_.depth);
    int64_t depth = t_.depth;
    for (int64_t n = t_.here; n >= 0; n = behind(n).parent) {
      write(--depth, n, tree_token(p_, t_.b, n), t_.records[n].logprob);
    }
    if (r.over) return finish();
    t_.status |= r.status;
    if (r.status == kTargetNotFinite) return finish();
    if (r.first < 0) return measure_whole();
    restore();
    t_.known ? draw_left() : scan(Scan::kLeft, TreeState::kAgain);
  }

  __forceinline__ __device__ void draw_left() {
    if (t_.more > 0) return draw(true);
    t_.status |= kEmptyResidual;
    measure_whole();
  }

  __forceinline__ __device__ void draw_whole() {
    if (t_.law.sound) return draw(false);
    t_.status |= kTargetNotFinite;
    finish();
  }
};

}  // namespace specdec
