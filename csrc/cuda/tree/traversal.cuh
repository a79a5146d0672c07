#pragma once
// Rule traversal: from the leaves to the root, in the order in which nodes come. On a chain it says
// what rule block of verify_chain says, to the bit.
#include "cuda/tree/verifier.cuh"

namespace specdec::cuda {

class TreeVisitJudge : public TreePoint {
 public:
  using TreePoint::TreePoint;

  __forceinline__ __device__ void begin() {
    t_.here = kNone;
    t_.depth = 0;
    t_.num_tried = 0;
    t_.gathers = false;
    behind(kNone).c = 1;
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
        return enter();
      case TreeState::kNext:
        return t_.child < 0 ? think(TreeState::kSettle) : try_child();
      case TreeState::kArrived:
        return measured();
      case TreeState::kOpen:
        open();
        return measure_draft(TreeState::kCandidate);
      case TreeState::kCandidate:
        return judge_child();
      case TreeState::kLeft:
        return visit(next_carried(1.0, probability_ratio(t_.left / t_.mass, t_.draft.q_x)));
      case TreeState::kSettle:
        return settle();
      case TreeState::kReject:
        return go_back();
      case TreeState::kBack:
        return judge_back();
      case TreeState::kAccept:
        return accept();
      case TreeState::kAgain:
        return draw_left();
      case TreeState::kRow:
        return measure_target(TreeState::kWhole);
      case TreeState::kWhole:
        return draw_whole();
      default:
        return end(t_.token);
    }
  }

  // Of the row behind a node.
  __forceinline__ __device__ TreeRecord& behind(int64_t node) const {
    return t_.records[node < 0 ? p_.nodes : node];
  }

  __forceinline__ __device__ void enter() {
    t_.child = kNone;
    t_.known = false;
    TreeRecord& r = behind(t_.here);
    r.stands = r.c;
    r.mass = 1;
    r.first = r.last = kNone;
    r.status = 0;
    r.measured = false;
    r.over = over();
    r.over || t_.depth >= p_.max_depth ? think(TreeState::kSettle) : seek();
  }

  __forceinline__ __device__ void seek() {
    t_.state = TreeState::kNext;
    t_.action = TreeAction::kSeek;
  }

  // The row at hand again, and what of it is left.
  __forceinline__ __device__ void restore() {
    const TreeRecord& r = behind(t_.here);
    take_row();
    copy(t_.stats, r.stats);
    t_.c = r.c;
    t_.mass = r.mass;
    t_.first = r.first;
    t_.last = r.last;
    t_.scan = Scan::kLeft;
  }

  __forceinline__ __device__ void try_child() {
    restore();
    behind(t_.here).measured ? think(TreeState::kOpen) : measure_target(TreeState::kArrived);
  }

  __forceinline__ __device__ void measured() {
    TreeRecord& r = behind(t_.here);
    r.measured = t_.stats.valid;
    copy(r.stats, t_.stats);
    if (!r.measured) r.status = kTargetNotFinite;
    think(r.measured ? TreeState::kOpen : TreeState::kSettle);
  }

  __forceinline__ __device__ void judge_child() {
    if (t_.draft.fault) {
      behind(t_.here).status = kDraftNotFinite;
      return think(TreeState::kSettle);
    }
    TreeRecord& r = keep_draft(t_.child);
    r.logprob = target_logprob(t_.x);
    if (t_.first >= 0 && t_.x < p_.vocab) return look(TreeState::kLeft);
    double ratio = 0;
    if (t_.first < 0 && t_.x < p_.vocab) {
      ratio = t_.direct ? probability_ratio(at(t_.row, t_.x), t_.draft.q_x)
                        : probability_ratio_of_logs(r.logprob, t_.draft.log_q_x);
    }
    visit(next_carried(t_.c, ratio));
  }

  // The candidate, accepted so far with probability c.
  __forceinline__ __device__ void visit(double c) {
    TreeRecord& r = behind(t_.child);
    r.parent = t_.here;
    r.c = c;
    t_.here = t_.child;
    ++t_.depth;
    think(TreeState::kEnter);
  }

  // Whether the node at hand stands; else what is left behind its parent is told.
  __forceinline__ __device__ void settle() {
    t_.child = t_.here;
    if (t_.here < 0) return think(TreeState::kAccept);
    const double h = behind(t_.here).stands;
    record_accept_prob(t_.here, h);
    think(accept_uniform(p_, t_, t_.here, 0, t_.here) < h ? TreeState::kAccept
                                                          : TreeState::kReject);
  }

  __forceinline__ __device__ void go_back() {
    t_.here = behind(t_.child).parent;
    --t_.depth;
    restore();
    copy(t_.draft, t_.records[t_.child].draft);
    copy(t_.q_stats, t_.records[t_.child].q_stats);
    append(t_.child, t_.mass);
    scan(Scan::kLeft, TreeState::kBack);
    t_.known = t_.direct || !t_.draft.few() || t_.first != t_.last;
    if (!t_.known) t_.action = TreeAction::kFew;
  }

  __forceinline__ __device__ void judge_back() {
    TreeRecord& r = behind(t_.here);
    const bool ends = !t_.valid || !(t_.second > 0);
    if (ends && (!t_.valid || t_.first != t_.last)) {
      r.status = t_.valid ? kEmptyResidual : kDraftNotFinite;
      t_.known = false;
      remove_last();
    } else if (!ends) {
      r.stands = block_accept_prob(r.stands, t_.more, t_.second);
      r.mass = t_.second;
    }
    r.first = t_.first;
    r.last = t_.last;
    ends ? think(TreeState::kSettle) : seek();
  }

  // The path to the node at hand, and one token more.
  __forceinline__ __device__ void accept() {
    const TreeRecord& r = behind(t_.here);
    t_.accepted = static_cast<int32_t>(t_.depth);
    int64_t depth = t_.depth;
    for (int64_t n = t_.here; n >= 0; n = behind(n).parent) {
      write(--depth, n, p_.drafted(t_.b, n), t_.records[n].logprob);
    }
    if (r.over) return finish();
    t_.status |= r.status;
    if (r.status == kTargetNotFinite) return finish();
    if (r.first < 0) return think(TreeState::kRow);
    restore();
    t_.known ? think(TreeState::kAgain) : scan(Scan::kLeft, TreeState::kAgain);
  }

  __forceinline__ __device__ void draw_left() {
    if (t_.more > 0) return draw(true);
    t_.status |= kEmptyResidual;
    think(TreeState::kRow);
  }

  __forceinline__ __device__ void draw_whole() {
    if (t_.stats.valid) return draw(false);
    t_.status |= kTargetNotFinite;
    finish();
  }
};

}  // namespace specdec::cuda
