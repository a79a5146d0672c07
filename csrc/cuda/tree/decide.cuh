#pragma once
// Every rule but traversal: from the root down, each step accepts one child or emits the token that
// ends the path. At temperature 0 every rule decides here, as rule greedy does.
#include "cuda/tree/k_seq.cuh"

namespace specdec::cuda {

class TopDown : KSeq {
 public:
  using KSeq::KSeq;

  __device__ void run() {
    int32_t node = kNone;
    for (int32_t depth = 0;; ++depth) {
      if (thread_id() == 0) s_.accepted = depth;
      if (ends_at(depth, node)) return;
      one([&] { open_step(job_, node, depth, 1); });
      const int64_t x = node < 0 ? 0 : p_.drafted(q_.b, node);
      const int64_t children = t_.depth < p_.max_depth ? sets().gather(node < 0, x) : 0;
      one([&] { t_.children = children; });
      if (!t_.target.stats.valid) return report_target();
      const int64_t child = decide();
      if (child == kNone) return emit(t_.token);
      one([&] {
        const int64_t token = p_.drafted(q_.b, child);
        write(depth, child, token, target_logprob(token));
      });
      node = static_cast<int32_t>(child);
    }
  }

 private:
  // The accepted child, or kNone: then the token that ends the path is t_.token.
  __device__ int64_t decide() {
    if (q_.greedy || p_.rule == TreeRule::kMatch) {
      choose(t_.target.token);
      return compare(1);
    }
    if (t_.children == 0) return ends_with(draw_target());
    switch (p_.rule) {
      case TreeRule::kTypical: {
        const int64_t child = compare(1);
        return child == kNone ? ends_with(draw_target()) : child;
      }
      case TreeRule::kTopKPlusOne:
        return try_last_of_top();
      case TreeRule::kKSeq:
        return try_k_seq();
      case TreeRule::kTargetOnly:
        choose(draw_target());
        return compare(1);
      default:
        return try_in_order();
    }
  }

  // The token that the target chose, or that was drawn.
  __device__ void choose(int64_t token) const {
    one([&] { t_.token = token; });
  }
  __device__ int64_t ends_with(int64_t token) {
    choose(token);
    return kNone;
  }

  // The child that holds t_.token; in rule typical the likeliest child above the bound. Records the
  // acceptance probability of all distinct children but `tried`, which has its own already;
  // `total_mass` is that of what t_.token was drawn from.
  __device__ int64_t compare(double total_mass, int64_t tried = kNone) {
    if (t_.children == 0) return kNone;
    uint64_t best = 0;
    const bool typical = p_.rule == TreeRule::kTypical && !q_.greedy;
    const RowStats& stats = t_.target.stats;
    const double bound =
        typical ? typical_bound(p_.typical_epsilon, p_.typical_delta, t_.target.asked) : 0;
    for (int64_t n = thread_id(); n < q_.nodes; n += kThreads) {
      if (!sets().is_distinct(n) || n == tried) continue;
      const int64_t x = p_.drafted(q_.b, n);
      bool accepted = x == t_.token;
      uint32_t score = 1;
      double probability = accepted;
      if (!q_.greedy && p_.rule != TreeRule::kMatch) {
        const float value = x < p_.vocab ? at(t_.row, x) : 0.0f;
        const double p_x =
            x >= p_.vocab ? 0
            : q_.direct   ? static_cast<double>(value)
                          : fmin(1.0, exp_of(stats.logprob(value)));  // a sum of rounded weights
        probability = p_x / total_mass;
        if (typical) {
          accepted = p_x > bound;
          probability = accepted;
          score = ordered_key(value);
        }
      }
      record_accept_prob(n, probability);
      const uint64_t key = uint64_t{score} << 32 | static_cast<uint32_t>(~n);
      if (accepted && key > best) best = key;
    }
    best = block().max(best);
    return best == 0 ? kNone : int64_t{static_cast<uint32_t>(~best)};
  }

  // Rules multi_draft and multi_draft_wor: the children are tried one after the other, each against
  // the residual after those before it.
  __device__ int64_t try_in_order() {
    const bool without_replacement = p_.rule == TreeRule::kMultiDraftWor;
    const ScanKind kind = without_replacement ? ScanKind::kExcluding : ScanKind::kResidual;
    int64_t n = kNone;
    for (int64_t trial = 0;; ++trial) {
      n = sets().next(n, without_replacement);
      if (n < 0) break;
      const int32_t same = same_draft_as(n);
      double remaining = 1;
      if (without_replacement) {
        if (same >= 0) remaining = records()[same].remaining_mass;
        // Outside the excluded tokens Q has no mass that this child could have been drawn from.
        if (!(remaining > kLeastMass)) continue;
      }
      one([&] {
        open_child(job_, n, n);
        // A row that was read for a sibling is not checked again.
        if (same >= 0) t_.draft.row_checked |= records()[same].draft.row_checked;
      });
      if (t_.draft.invalid_at_token) {
        report(kDraftInvalid);
        break;
      }
      if (accepts(trial, remaining, kind)) return n;
      one([&] {
        push_draft(t_.residual_mass / remaining);
        if (without_replacement) {
          job_.excluded[q_.b * p_.nodes + t_.num_excluded++] = {t_.x, n};
        }
      });
      sum_residual(kind);
      if (!t_.drafts_valid) {
        report(kDraftInvalid);
        one([&] {
          pop_draft();
          if (without_replacement) --t_.num_excluded;
        });
        if (t_.first_draft >= 0) sum_residual(kind);
        break;
      }
      if (!(t_.positive_sum > 0)) {
        report(kEmptyResidual);
        return ends_with(draw_target());
      }
      one([&] {
        t_.residual_mass = t_.positive_sum;
        records()[n].remaining_mass = t_.second_sum;
      });
    }
    return ends_with(t_.first_draft < 0 ? draw_target() : draw_residual(kind));
  }

  // The test of the child against the residual, or against P before any rejection.
  __device__ bool accepts(int64_t trial, double remaining, ScanKind kind) {
    if (t_.first_draft < 0) return test(trial, 1);
    const float residual = t_.x < p_.vocab ? residual_at_child(kind) : 0.0f;
    return by_one([&] {
      const double q_x = t_.residual_mass * t_.draft.q_x / remaining;
      const Acceptance a =
          accept_ratio(accept_uniform(p_, q_, t_.child, t_.depth, trial), residual, q_x);
      record_accept_prob(t_.child, a.probability);
      return a.accepted;
    });
  }

  // Rule top_k_plus_one: all children but the last are the top tokens of Q. The last one was drawn
  // from Q without them and is the only one that is tried; then a token is drawn, which may be one
  // of the top tokens.
  __device__ int64_t try_last_of_top() {
    int64_t last = kNone;
    for (int64_t n = sets().next(kNone, false); n >= 0; n = sets().next(n, false)) last = n;
    const bool in_top = by_one([&] {
      const int64_t x = p_.drafted(q_.b, last);
      bool found = false;
      for (int64_t n = sets().next(kNone, true); n >= 0; n = sets().next(n, true)) {
        if (n == last) continue;
        const int64_t token = p_.drafted(q_.b, n);
        job_.excluded[q_.b * p_.nodes + t_.num_excluded++] = {token, last};
        found |= token == x;
      }
      return found;
    });
    // Acceptance probabilities refer to what was drawn from. P may hold probabilities as they were
    // given, which need not sum to exactly 1.
    double drawn_from = q_.direct ? exp_of(t_.target.stats.log_sum) : 1.0;
    if (!in_top && tries_last(last)) return last;
    const bool from_residual = t_.first_draft >= 0;
    if (from_residual) drawn_from = t_.positive_sum;
    choose(from_residual ? draw_residual(ScanKind::kExcluding) : draw_target());
    return compare(drawn_from, in_top ? kNone : last);
  }

  // Afterwards a draft is subtracted if the token must be drawn from the residual.
  __device__ bool tries_last(int64_t last) {
    one([&] { open_child(job_, last, last); });
    if (t_.draft.invalid_at_token) {
      report(kDraftInvalid);
      return false;
    }
    one([&] { push_draft(1); });
    sum_residual(ScanKind::kRemainingMass);
    const double mass = t_.num_excluded == 0 ? 1.0 : t_.second_sum;
    one([&] { clear_drafts(); });
    if (!t_.drafts_valid) {
      report(kDraftInvalid);
      return false;
    }
    if (!(mass > kLeastMass)) return false;
    if (test(0, 1 / mass)) return true;
    one([&] { push_draft(1 / mass); });
    sum_residual(ScanKind::kExcluding);
    if (t_.drafts_valid && t_.positive_sum > 0) return false;
    report(t_.drafts_valid ? kEmptyResidual : kDraftInvalid);
    one([&] { clear_drafts(); });
    return false;
  }

  __device__ int64_t try_k_seq() {
    const int64_t first = sets().next(kNone, false);
    one([&] { open_child(job_, first, first); });
    if (t_.draft.invalid_at_token || !find_factor()) {
      report(kDraftInvalid);
      return ends_with(draw_target());
    }
    int64_t trial = 0;
    for (int64_t n = first; n >= 0; n = sets().next(n, false), ++trial) {
      one([&] { open_child(job_, n, first); });
      if (test(trial, t_.rho)) return n;
    }
    sum_k_seq_residual();
    if (t_.drafts_valid && t_.positive_sum > 0) {
      return ends_with(draw_residual(ScanKind::kKSeqResidual));
    }
    report(t_.drafts_valid ? kEmptyResidual : kDraftInvalid);
    return ends_with(draw_target());
  }

  // Made anew at each use, because it would occupy registers in between.
  __device__ NodeSets sets() {
    return {s_, p_, q_, q_.nodes, job_.node_sets + q_.b * 3 * job_.words(), job_.words()};
  }
};

}  // namespace specdec::cuda
