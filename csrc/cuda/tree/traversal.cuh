#pragma once
// Rule traversal: nodes are tested from the leaves to the root, children in the order of their
// numbers. On a tree without siblings it equals rule block of verify_chain, to the bit.
// See docs/rules.md#traversal.
#include "cuda/tree/verifier.cuh"

namespace specdec::cuda {

class TraversalVerifier : public TreeVerifier {
 public:
  using TreeVerifier::TreeVerifier;

  __forceinline__ __device__ void begin() {
    t_.node = kNone;
    t_.depth = 0;
    t_.num_excluded = 0;
    t_.gathers_children = false;
    record_after(kNone).target_scale = 1;
    t_.state = TreeState::kEnterNode;
    go_on();
  }

  // Decides until there is an action for all threads.
  __forceinline__ __device__ void go_on() {
    do {
      t_.action = TreeAction::kContinue;
      decide();
    } while (t_.action == TreeAction::kContinue);
  }

 private:
  __forceinline__ __device__ void decide() {
    switch (t_.state) {
      case TreeState::kEnterNode:
        return enter_node();
      case TreeState::kNextChild:
        return t_.child < 0 ? go_to(TreeState::kTestNode) : try_child();
      case TreeState::kTargetMeasured:
        return target_measured();
      case TreeState::kOpenDraft:
        open_draft_of_child();
        return measure_draft(TreeState::kDraftMeasured);
      case TreeState::kDraftMeasured:
        return weigh_child();
      case TreeState::kResidualRead:
        return enter_child(next_p_scale(
            1.0, probability_ratio(t_.residual_at_x / t_.residual_mass, t_.draft.q_x)));
      case TreeState::kTestNode:
        return test_node();
      case TreeState::kReject:
        return reject_node();
      case TreeState::kParentMeasured:
        return parent_measured();
      case TreeState::kAcceptPath:
        return accept_path();
      case TreeState::kRescanned:
        return draw_recovered();
      case TreeState::kReadRowAgain:
        return measure_target(TreeState::kRowReadAgain);
      case TreeState::kRowReadAgain:
        return draw_from_target();
      default:
        return emit(t_.token);
    }
  }

  // The record of the target row after a node; the root's record is the last one.
  __forceinline__ __device__ NodeRecord& record_after(int64_t node) const {
    return t_.records[node < 0 ? p_.nodes : node];
  }

  __forceinline__ __device__ void enter_node() {
    t_.child = kNone;
    t_.residual_is_summed = false;
    NodeRecord& r = record_after(t_.node);
    r.accept_prob = r.target_scale;
    r.residual_mass = 1;
    r.first_draft = r.last_draft = kNone;
    r.status = 0;
    r.measured = false;
    r.ends_path = ends_here();
    r.ends_path || t_.depth >= p_.max_depth ? go_to(TreeState::kTestNode) : find_child();
  }

  __forceinline__ __device__ void find_child() {
    t_.state = TreeState::kNextChild;
    t_.action = TreeAction::kFindChild;
  }

  // Makes the row after the current node the current row again, with its residual.
  __forceinline__ __device__ void restore_row() {
    const NodeRecord& r = record_after(t_.node);
    open_row();
    copy(t_.stats, r.stats);
    t_.target_scale = r.target_scale;
    t_.residual_mass = r.residual_mass;
    t_.first_draft = r.first_draft;
    t_.last_draft = r.last_draft;
    t_.scan = ScanKind::kResidual;
  }

  __forceinline__ __device__ void try_child() {
    restore_row();
    const bool measured = record_after(t_.node).measured;
    measured ? go_to(TreeState::kOpenDraft) : measure_target(TreeState::kTargetMeasured);
  }

  __forceinline__ __device__ void target_measured() {
    NodeRecord& r = record_after(t_.node);
    r.measured = t_.stats.valid;
    copy(r.stats, t_.stats);
    if (!r.measured) r.status = kTargetInvalid;
    go_to(r.measured ? TreeState::kOpenDraft : TreeState::kTestNode);
  }

  __forceinline__ __device__ void weigh_child() {
    if (t_.draft.invalid_at_token) {
      record_after(t_.node).status = kDraftInvalid;
      return go_to(TreeState::kTestNode);
    }
    NodeRecord& r = keep_draft(t_.child);
    r.logprob = target_logprob(t_.x);
    if (t_.first_draft >= 0 && t_.x < p_.vocab) return read_residual(TreeState::kResidualRead);
    double ratio = 0;
    if (t_.first_draft < 0 && t_.x < p_.vocab) {
      ratio = ratio_of_draft(t_.direct, at(t_.row, t_.x), r.logprob, t_.draft);
    }
    enter_child(next_p_scale(t_.target_scale, ratio));
  }

  // Descends to the child, whose acceptance probability before its own children count is given.
  __forceinline__ __device__ void enter_child(double accept_prob) {
    NodeRecord& r = record_after(t_.child);
    r.parent = t_.node;
    r.target_scale = accept_prob;
    t_.node = t_.child;
    ++t_.depth;
    go_to(TreeState::kEnterNode);
  }

  // Every node has a uniform of its own at the first position: siblings and depths share none.
  __forceinline__ __device__ void test_node() {
    t_.child = t_.node;
    if (t_.node < 0) return go_to(TreeState::kAcceptPath);
    const double h = record_after(t_.node).accept_prob;
    record_accept_prob(t_.node, h);
    go_to(accept_uniform(p_, t_, t_.node, 0, t_.node) < h ? TreeState::kAcceptPath
                                                          : TreeState::kReject);
  }

  // Subtracts the draft of the rejected node from the residual of its parent.
  __forceinline__ __device__ void reject_node() {
    t_.node = record_after(t_.child).parent;
    --t_.depth;
    restore_row();
    copy(t_.draft, t_.records[t_.child].draft);
    copy(t_.q_stats, t_.records[t_.child].q_stats);
    push_draft(t_.child, t_.residual_mass);
    scan(ScanKind::kResidual, TreeState::kParentMeasured);
    t_.residual_is_summed =
        t_.direct || !t_.draft.lists_tokens() || t_.first_draft != t_.last_draft;
    if (!t_.residual_is_summed) t_.action = TreeAction::kSumResidualOfFew;
  }

  __forceinline__ __device__ void parent_measured() {
    NodeRecord& r = record_after(t_.node);
    const bool ends = !t_.drafts_valid || !(t_.second_sum > 0);
    if (ends) {
      r.status = t_.drafts_valid ? kEmptyResidual : kDraftInvalid;
      t_.residual_is_summed = false;
      pop_draft();
    } else {
      r.accept_prob = block_accept_prob(r.accept_prob, t_.positive_sum, t_.second_sum);
      r.residual_mass = t_.second_sum;
    }
    r.first_draft = t_.first_draft;
    r.last_draft = t_.last_draft;
    ends ? go_to(TreeState::kTestNode) : find_child();
  }

  __forceinline__ __device__ void accept_path() {
    const NodeRecord& r = record_after(t_.node);
    t_.accepted = static_cast<int32_t>(t_.depth);
    int64_t depth = t_.depth;
    for (int64_t n = t_.node; n >= 0; n = record_after(n).parent) {
      write(--depth, n, p_.drafted(t_.b, n), t_.records[n].logprob);
    }
    if (r.ends_path) return finish();
    t_.status |= r.status;
    if (r.status == kTargetInvalid) return finish();
    if (r.first_draft < 0) return go_to(TreeState::kReadRowAgain);
    restore_row();
    t_.residual_is_summed ? go_to(TreeState::kRescanned)
                          : scan(ScanKind::kResidual, TreeState::kRescanned);
  }

  __forceinline__ __device__ void draw_recovered() {
    if (t_.positive_sum > 0) return draw(true);
    t_.status |= kEmptyResidual;
    go_to(TreeState::kReadRowAgain);
  }

  __forceinline__ __device__ void draw_from_target() {
    if (t_.stats.valid) return draw(false);
    t_.status |= kTargetInvalid;
    finish();
  }
};

}  // namespace specdec::cuda
