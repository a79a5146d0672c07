#pragma once
// Rule traversal: nodes are tested from the leaves to the root, children in the order of their
// numbers. On a tree without siblings it equals rule block of verify_chain, to the bit.
// See docs/rules.md#traversal.
#include "cuda/tree/verifier.cuh"

namespace specdec::cuda {

class Traversal : TreeVerifier {
 public:
  using TreeVerifier::TreeVerifier;

  // Depth first: descends to the first leaf and tests it; if it is rejected, its draft is
  // subtracted from the residual of its parent, whose next child follows, or the parent itself is
  // tested.
  __device__ void run() {
    int32_t node = kNone, depth = 0, child = kNone;  // 64 bits would spill registers
    one([&] { t_.summed = false; });  // by the last scan, of the residual of the row after `node`
    one([&] { enter(kNone, kNone, depth, 1); });
    for (bool descends = true;;) {
      child = descends ? static_cast<int32_t>(next_child(node, child, depth)) : kNone;
      descends = true;
      if (child != kNone) {
        const double accept_prob = weigh(node, depth, child);
        if (accept_prob >= 0) {
          ++depth;
          one([&] { enter(child, node, depth, accept_prob); });
          node = child;
          child = kNone;
          one([&] { t_.summed = false; });
          continue;
        }
      }
      if (node < 0 || accepts(node)) return accept_path(node, depth);
      child = node;
      node = static_cast<int32_t>(record_after(child).parent);
      --depth;
      descends = subtract(node, depth, child);
    }
  }

 private:
  // The record of the target row after a node; the root's record is the last one.
  __device__ NodeRecord& record_after(int64_t node) const {
    return records()[node < 0 ? p_.nodes : node];
  }

  // Descends to a node whose acceptance probability, before its own children count, is given. For
  // one thread.
  __device__ void enter(int64_t node, int64_t parent, int64_t depth, double accept_prob) const {
    NodeRecord& r = record_after(node);
    r.parent = parent;
    r.target_scale = r.accept_prob = accept_prob;
    r.residual_mass = 1;
    r.first_draft = r.last_draft = kNone;
    r.status = 0;
    r.ends_path = ends_at(depth, node);
  }

  // The first child of a node after `child`, kNone if there is none to try.
  __device__ int64_t next_child(int64_t node, int64_t child, int64_t depth) {
    if (record_after(node).ends_path || depth >= p_.max_depth) return kNone;
    constexpr uint64_t kNoChild = ~uint64_t{0};
    uint64_t first = kNoChild;
    int64_t n = (child > node ? child : node) + 1 + thread_id();
    for (; n < q_.nodes && first == kNoChild; n += kThreads) {
      if (is_child(p_, q_.b, n, node)) first = static_cast<uint64_t>(n);
    }
    first = block().min(first);
    return first == kNoChild ? kNone : static_cast<int64_t>(first);
  }

  // Makes the row after a node the current one again, with its residual. For one thread.
  __device__ void restore(int64_t node, int64_t depth) const {
    const NodeRecord& r = record_after(node);
    open_step(job_, node, depth, r.target_scale);
    t_.residual_mass = r.residual_mass;
    t_.first_draft = r.first_draft;
    t_.last_draft = r.last_draft;
  }

  // The acceptance probability of a child before its own children count; negative if a row is not
  // valid: then the node is tested as if it had no further children.
  __device__ double weigh(int64_t node, int64_t depth, int64_t child) {
    const int32_t fault = by_one([&] {
      restore(node, depth);
      int32_t status = t_.target.stats.valid ? 0 : kTargetInvalid;
      if (status == 0) {
        open_child(job_, child, child);
        status = t_.draft.invalid_at_token ? kDraftInvalid : 0;
      }
      if (status != 0) {
        record_after(node).status = status;
      } else {
        records()[child].draft = t_.draft;
        records()[child].logprob = target_logprob(t_.x);
      }
      return status;
    });
    if (fault != 0) return -1;
    const bool inside = t_.x < p_.vocab;
    if (t_.first_draft >= 0 && inside) {
      const double residual = residual_at_child(ScanKind::kResidual);
      return by_one([&] {
        return next_p_scale(1.0, probability_ratio(residual / t_.residual_mass, t_.draft.q_x));
      });
    }
    return by_one([&] {
      double ratio = 0;
      if (inside && t_.first_draft < 0) {
        ratio = ratio_of_draft(q_.direct, at(t_.row, t_.x), records()[child].logprob, t_.draft);
      }
      return next_p_scale(t_.target_scale, ratio);
    });
  }

  // Every node has a uniform of its own at the first position: siblings and depths share none.
  __device__ bool accepts(int64_t node) {
    return by_one([&] {
      const double h = record_after(node).accept_prob;
      record_accept_prob(node, h);
      return accept_uniform(p_, q_, node, 0, node) < h;
    });
  }

  // Subtracts the draft of a rejected child from the residual of its parent. Returns whether the
  // next child may be tried.
  __device__ bool subtract(int64_t node, int64_t depth, int64_t child) {
    one([&] {
      restore(node, depth);
      t_.child = child;
      t_.x = p_.drafted(q_.b, child);
      t_.draft = records()[child].draft;
      push_draft(t_.residual_mass);
    });
    // P is read at the drafted tokens alone where the first draft lists them.
    const bool scans = q_.direct || !t_.draft.lists_tokens() || t_.first_draft != t_.last_draft;
    if (scans) {
      sum_residual(ScanKind::kResidual);
    } else {
      ThreadBlock block = this->block();
      sum_residual_of_few(block, t_.draft, t_.row, t_.target.stats, t_.target_scale,
                          t_.positive_sum, t_.second_sum);
      one([&] { t_.drafts_valid = true; });
    }
    const bool goes_on = by_one([&] {
      NodeRecord& r = record_after(node);
      const bool ends = !t_.drafts_valid || !(t_.second_sum > 0);
      if (ends) {
        r.status = t_.drafts_valid ? kEmptyResidual : kDraftInvalid;
        pop_draft();
      } else {
        r.accept_prob = block_accept_prob(r.accept_prob, t_.positive_sum, t_.second_sum);
        r.residual_mass = t_.second_sum;
      }
      r.first_draft = t_.first_draft;
      r.last_draft = t_.last_draft;
      return !ends;
    });
    one([&] { t_.summed = scans && goes_on; });
    return goes_on;
  }

  __device__ void accept_path(int64_t node, int64_t depth) {
    const NodeRecord& r = record_after(node);
    one([&] {
      s_.accepted = static_cast<int32_t>(depth);
      int64_t at_depth = depth;
      for (int64_t n = node; n >= 0; n = record_after(n).parent) {
        write(--at_depth, n, p_.drafted(q_.b, n), records()[n].logprob);
      }
    });
    if (r.ends_path) return;
    one([&] { restore(node, depth); });
    if (r.status == kTargetInvalid) return report_target();
    report(r.status);
    if (r.first_draft >= 0) {
      if (!t_.summed) sum_residual(ScanKind::kResidual);
      if (t_.positive_sum > 0) return emit(draw_residual(ScanKind::kResidual));
      report(kEmptyResidual);
    }
    if (!t_.target.stats.valid) return report_target();
    emit(draw_target());
  }
};

}  // namespace specdec::cuda
