#pragma once
// Every rule but traversal: from the root down, each step accepts one child or emits the token that
// ends the path. At temperature 0 every rule decides here, as rule greedy does.
// specdec_kernels/reference/tree/verify_tree.py says the same without a state machine.
#include "cuda/tree/k_seq.cuh"

namespace specdec::cuda {

class TopDownVerifier : public KSeqVerifier {
 public:
  using KSeqVerifier::KSeqVerifier;

  __forceinline__ __device__ void begin() {
    t_.node = kNone;
    t_.depth = 0;
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
      case TreeState::kTargetMeasured:
        return choose_method();
      case TreeState::kNextChild:
        return next_trial();
      case TreeState::kOpenDraft:
        open_draft_of_child(k_seq() ? t_.first_draft : kNone);
        return measure_draft(TreeState::kDraftMeasured);
      case TreeState::kDraftMeasured:
        return prepare_test();
      case TreeState::kTest:
        return go_to(accepts(t_.draft_scale) ? TreeState::kAcceptChild : TreeState::kReject);
      case TreeState::kResidualRead:
        return test_residual();
      case TreeState::kReject:
        return reject();
      case TreeState::kAcceptChild:
        return accept_child();
      case TreeState::kSubtracted:
        return subtracted();
      case TreeState::kRemainingMass:
        return test_last_of_top();
      case TreeState::kOverlapsMeasured:
        return search_factor();
      case TreeState::kEntropyMeasured:
        return compare_typical();
      case TreeState::kChildrenCompared:
        return children_compared();
      case TreeState::kDrawn:
        return drawn();
      case TreeState::kEmit:
        return emit(t_.token);
      default:
        return draw(true);
    }
  }

  __forceinline__ __device__ bool without_replacement() const {
    return p_.rule == TreeRule::kMultiDraftWor;
  }
  __forceinline__ __device__ bool k_seq() const { return p_.rule == TreeRule::kKSeq; }
  __forceinline__ __device__ bool top_k() const { return p_.rule == TreeRule::kTopKPlusOne; }

  __forceinline__ __device__ void enter_node() {
    t_.accepted = static_cast<int32_t>(t_.depth);
    if (ends_here()) return finish();
    t_.gathers_children = t_.depth < p_.max_depth;
    t_.num_children = 0;
    t_.child = t_.trial = t_.last_tried = -1;
    t_.target_scale = t_.residual_mass = t_.total_mass = 1;
    t_.num_excluded = 0;
    t_.scan = ScanKind::kResidual;
    clear_drafts();
    measure_target(TreeState::kTargetMeasured);
  }

  __forceinline__ __device__ void accept_child() {
    t_.x = p_.drafted(t_.b, t_.child);
    write(t_.depth, t_.child, t_.x, target_logprob(t_.x));
    t_.node = t_.child;
    ++t_.depth;
    go_to(TreeState::kEnterNode);
  }

  __forceinline__ __device__ void choose_method() {
    if (!t_.stats.valid) {
      t_.status |= kTargetInvalid;
      return finish();
    }
    t_.gathers_children = false;
    if (t_.greedy || p_.rule == TreeRule::kMatch) return compare_children();
    if (t_.num_children == 0 || p_.rule == TreeRule::kTargetOnly) return draw(false);
    if (p_.rule == TreeRule::kTypical) return scan(ScanKind::kEntropy, TreeState::kEntropyMeasured);
    if (top_k()) return try_last_of_top();
    if (k_seq()) return try_child(next_child(-1, false));
    go_to(TreeState::kNextChild);
  }

  // Accepts the child that holds t_.token, if there is one.
  __forceinline__ __device__ void compare_children() {
    if (t_.num_children == 0) return go_to(TreeState::kEmit);
    t_.state = TreeState::kChildrenCompared;
    t_.action = TreeAction::kCompareChildren;
  }

  __forceinline__ __device__ void children_compared() {
    if (t_.child >= 0) return go_to(TreeState::kAcceptChild);
    p_.rule == TreeRule::kTypical && !t_.greedy ? draw(false) : go_to(TreeState::kEmit);
  }

  __forceinline__ __device__ void drawn() {
    if (!top_k() && p_.rule != TreeRule::kTargetOnly) return go_to(TreeState::kEmit);
    // Acceptance probabilities refer to what was drawn from. Under top_k_plus_one, P may hold
    // probabilities as they were given, which need not sum to exactly 1.
    t_.total_mass = t_.from_residual       ? t_.positive_sum
                    : top_k() && t_.direct ? exp(t_.stats.log_sum)
                                           : 1.0;
    compare_children();
  }

  __forceinline__ __device__ void compare_typical() {
    t_.typical_bound =
        typical_bound(p_.typical_epsilon, p_.typical_delta, t_.stats.entropy(t_.positive_sum));
    t_.state = TreeState::kChildrenCompared;
    t_.action = TreeAction::kCompareChildren;
  }

  __forceinline__ __device__ void try_child(int64_t n) {
    t_.child = n;
    ++t_.trial;
    go_to(TreeState::kOpenDraft);
  }

  // The draft of the child is known: test it, after what the rule needs to know first.
  __forceinline__ __device__ void prepare_test() {
    t_.draft_scale = k_seq() ? t_.high : 1.0;
    if (k_seq() && t_.first_draft >= 0) return go_to(TreeState::kTest);
    if (t_.draft.invalid_at_token) return stop_trials();
    if (k_seq()) return begin_search();
    if (top_k()) {
      push_draft(t_.child, 1);
      return scan(ScanKind::kRemainingMass, TreeState::kRemainingMass);
    }
    if (t_.first_draft < 0) return go_to(TreeState::kTest);
    if (t_.x < p_.vocab) return read_residual(TreeState::kResidualRead);
    t_.residual_at_x = 0;
    go_to(TreeState::kResidualRead);
  }

  __forceinline__ __device__ void next_trial() {
    int64_t n = t_.child;
    for (;;) {
      n = next_child(n, without_replacement());
      if (n < 0) return k_seq() ? scan_k_seq_residual() : draw(t_.first_draft >= 0);
      t_.remaining_mass = 1;
      if (!without_replacement() || t_.first_draft < 0) break;
      const int32_t same = same_draft_as(n);
      if (same >= 0) t_.remaining_mass = t_.records[same].remaining_mass;
      if (t_.remaining_mass > kLeastMass) break;
      // Outside the excluded tokens Q has no mass that this child could have been drawn from.
      ++t_.trial;
    }
    try_child(n);
  }

  __forceinline__ __device__ void test_residual() {
    const double q_x = t_.residual_mass * t_.draft.q_x / t_.remaining_mass;
    const double u = accept_uniform(p_, t_, t_.child, t_.depth, t_.trial);
    const bool accepted = record_test(accept_ratio(u, t_.residual_at_x, q_x));
    go_to(accepted ? TreeState::kAcceptChild : TreeState::kReject);
  }

  __forceinline__ __device__ void reject() {
    if (k_seq()) return go_to(TreeState::kNextChild);
    push_draft(t_.child, top_k() ? t_.draft_scale : t_.residual_mass / t_.remaining_mass);
    if (without_replacement()) t_.excluded[t_.num_excluded++] = {t_.x, t_.child};
    const bool excludes = top_k() || without_replacement();
    scan(excludes ? ScanKind::kExcluding : ScanKind::kResidual, TreeState::kSubtracted);
  }

  __forceinline__ __device__ void subtracted() {
    if (!t_.drafts_valid) {
      pop_draft();
      if (without_replacement()) --t_.num_excluded;
      t_.status |= kDraftInvalid;
      return t_.first_draft < 0 ? draw(false) : scan(t_.scan, TreeState::kRescanned);
    }
    if (!(t_.positive_sum > 0)) {
      t_.status |= kEmptyResidual;
      return draw(false);
    }
    if (top_k() || k_seq()) return draw(true);
    t_.residual_mass = t_.positive_sum;
    t_.records[t_.child].remaining_mass = t_.second_sum;
    go_to(TreeState::kNextChild);
  }

  // The draft row of the child is invalid: the siblings after it are not tried either.
  __forceinline__ __device__ void stop_trials() {
    t_.status |= kDraftInvalid;
    draw(t_.first_draft >= 0);
  }

  // Rule top_k_plus_one: all children but the last are the top tokens of Q. The last one was drawn
  // from Q without them and is the only one that is tried.
  __forceinline__ __device__ void try_last_of_top() {
    int64_t last = -1;
    for (int64_t n = next_child(-1, false); n >= 0; n = next_child(n, false)) last = n;
    const int64_t x = p_.drafted(t_.b, last);
    bool in_top = false;
    for (int64_t n = next_child(-1, true); n >= 0; n = next_child(n, true)) {
      if (n == last) continue;
      const int64_t token = p_.drafted(t_.b, n);
      t_.excluded[t_.num_excluded++] = {token, last};
      in_top |= token == x;
    }
    if (in_top) return draw(false);
    t_.last_tried = last;
    try_child(last);
  }

  __forceinline__ __device__ void test_last_of_top() {
    const double mass = t_.num_excluded == 0 ? 1.0 : t_.second_sum;
    clear_drafts();
    if (!t_.drafts_valid) return stop_trials();
    if (!(mass > kLeastMass)) return draw(false);
    t_.draft_scale = 1 / mass;
    go_to(TreeState::kTest);
  }

  __forceinline__ __device__ void search_factor() {
    if (!t_.drafts_valid) {
      clear_drafts();
      return stop_trials();
    }
    if (!narrow_search()) return;
    t_.child = t_.trial = -1;
    go_to(TreeState::kNextChild);
  }
};

}  // namespace specdec::cuda
