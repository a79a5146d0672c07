#pragma once
// The base of the two verifiers: TopDownVerifier (decide.cuh) accepts a child of each node from the
// root down, TraversalVerifier (traversal.cuh) tests nodes from the leaves up. One thread of each
// block runs them.
#include "cuda/tree/sequence.cuh"

namespace specdec::cuda {

__forceinline__ __device__ double target_logprob(const RowView& row, const RowStats& stats,
                                                 int64_t token) {
  return token < row.vocab ? stats.logprob(at(row, token)) : -INFINITY;
}

// The ratio test of a drafted token with the acceptance uniform u; `scale` is the factor of Q.
__forceinline__ __device__ Acceptance test_draft(const SequenceState& s, const RowView& row,
                                                 const RowStats& stats, int64_t token, double u,
                                                 double scale, const DraftDistribution& draft) {
  const float p_x = s.direct && token < row.vocab ? at(row, token) : 0.0f;
  const double log_p = s.direct ? -INFINITY : target_logprob(row, stats, token);
  return accept_draft(s.direct, u, p_x, log_p, scale, draft);
}

class TreeVerifier {
 public:
  __device__ TreeVerifier(const TreeJob& job, TreeTask& task) : job_(job), p_(job.p), t_(task) {}

 protected:
  // Each of these names the action that comes next, and the state after it.

  __forceinline__ __device__ void finish() { t_.action = TreeAction::kDone; }

  __forceinline__ __device__ void go_to(TreeState state) {
    t_.state = state;
    t_.action = TreeAction::kContinue;
  }

  // Rows alternate between two tile statistics: a fast block writes one while others still read the
  // other.
  __forceinline__ __device__ void measure_target(TreeState state) {
    open_row();
    t_.stats_buffer ^= 1;
    t_.tile_stats = job_.tile_stats(t_.context, TreeJob::kTargetStats + t_.stats_buffer);
    t_.measured_row = t_.row;
    t_.measured_tile_stats = t_.tile_stats;
    t_.measures_draft = false;
    t_.state = state;
    t_.action = TreeAction::kMeasure;
  }

  // Measures the child's draft row where Q(x) cannot be told without.
  __forceinline__ __device__ void measure_draft(TreeState state) {
    t_.state = state;
    if (!t_.draft.unmeasured()) {
      const bool looks_up = t_.draft.form == DraftForm::kSparse && !t_.draft.invalid_at_token;
      t_.action = looks_up ? TreeAction::kLookUpSparse : TreeAction::kContinue;
      return;
    }
    t_.draft_stats_buffer ^= 1;
    t_.measured_row = t_.draft.row;
    t_.measured_tile_stats =
        job_.tile_stats(t_.context, TreeJob::kDraftStats + t_.draft_stats_buffer);
    t_.measures_draft = true;
    t_.action = TreeAction::kMeasure;
  }

  __forceinline__ __device__ void scan(ScanKind kind, TreeState state) {
    t_.scan = kind;
    t_.state = state;
    t_.action = TreeAction::kScanResidual;
  }

  __forceinline__ __device__ void read_residual(TreeState state) {
    t_.state = state;
    t_.action = TreeAction::kReadResidual;
  }

  __forceinline__ __device__ void draw(bool from_residual) {
    t_.from_residual = from_residual;
    t_.state = TreeState::kDrawn;
    t_.action = TreeAction::kDraw;
  }

  // Emits the token that ends the path.
  __forceinline__ __device__ void emit(int64_t token) {
    write(t_.depth, kNone, token, target_logprob(token));
    finish();
  }

  // The first child after n, or the first distinct one; -1 if there is none.
  __forceinline__ __device__ int64_t next_child(int64_t n, bool distinct) const {
    const uint32_t* const set = t_.node_sets + (distinct ? 2 : 1) * job_.words();
    for (++n; n < t_.nodes; n = (n / kLanes + 1) * kLanes) {
      const uint32_t word = set[n / kLanes] >> (n % kLanes);
      if (word != 0) return n + __ffs(static_cast<int>(word)) - 1;
    }
    return -1;
  }

  // Whether no token follows the current node: it is an end-of-sequence token or the last allowed.
  __forceinline__ __device__ bool ends_here() const {
    if (t_.depth >= t_.max_tokens) return true;
    return t_.node >= 0 && is_eos(p_, p_.drafted(t_.b, t_.node));
  }

  // The target row after the current node.
  __forceinline__ __device__ void open_row() { t_.row = target_row(p_, t_, t_.node + 1); }

  // Q of the child, or of another node at the child's token. If a subtracted draft is the same
  // distribution, its statistics are taken over.
  __forceinline__ __device__ void open_draft_of_child(int32_t node = kNone) {
    t_.x = p_.drafted(t_.b, t_.child);
    open_draft(p_, t_, node < 0 ? t_.child : node, t_.x, t_.draft);
    const int32_t same = node < 0 ? same_draft_as(t_.child) : node;
    if (!t_.draft.unmeasured() || same < 0) return;
    copy(t_.q_stats, t_.records[same].q_stats);
    t_.draft.row_checked = true;
    t_.draft.set(t_.q_stats);
  }

  // The last subtracted draft that is the distribution node n was drawn from, or kNone.
  __forceinline__ __device__ int32_t same_draft_as(int64_t n) const {
    int32_t found = kNone;
    if (!p_.draft_rows.given() || t_.draft.form == DraftForm::kOneHot) return found;
    for (int32_t e = t_.first_draft; e >= 0; e = t_.records[e].next_draft) {
      if (same_draft_row(p_, t_.b, e, n)) found = e;
    }
    return found;
  }

  // Adds the child's draft to those that are subtracted. The last one always has a record of its
  // own, because subtraction is clipped and a scan subtracts it after all others; the one that was
  // last so far is now joined with an earlier record of the same distribution.
  __forceinline__ __device__ void push_draft(int64_t n, double scale) {
    join_last_draft();
    NodeRecord& r = keep_draft(n);
    r.scale = static_cast<float>(scale);
    r.next_draft = kNone;
    (t_.first_draft < 0 ? t_.first_draft : t_.records[t_.last_draft].next_draft) =
        static_cast<int32_t>(n);
    t_.last_draft = static_cast<int32_t>(n);
  }

  __forceinline__ __device__ NodeRecord& keep_draft(int64_t n) {
    NodeRecord& r = t_.records[n];
    copy(r.draft, t_.draft);
    copy(r.q_stats, t_.q_stats);
    return r;
  }

  __forceinline__ __device__ void pop_draft() {
    int32_t before = kNone;
    for (int32_t e = t_.first_draft; e != t_.last_draft; e = t_.records[e].next_draft) before = e;
    (before < 0 ? t_.first_draft : t_.records[before].next_draft) = kNone;
    t_.last_draft = before;
  }

  __forceinline__ __device__ void clear_drafts() { t_.first_draft = t_.last_draft = kNone; }

  // Whether the child is accepted: u * s * Q(x) < P(x), strictly.
  __forceinline__ __device__ bool accepts(double s) const {
    const double u = accept_uniform(p_, t_, t_.child, t_.depth, t_.trial);
    return record_test(test_draft(t_, t_.row, t_.stats, t_.x, u, s, t_.draft));
  }

  // Records the test of the child; returns whether it was accepted.
  __forceinline__ __device__ bool record_test(const Acceptance& a) const {
    record_accept_prob(t_.child, a.probability);
    return a.accepted;
  }

  __forceinline__ __device__ double target_logprob(int64_t token) const {
    return cuda::target_logprob(t_.row, t_.stats, token);
  }

  __forceinline__ __device__ void record_accept_prob(int64_t n, double probability) const {
    cuda::record_accept_prob(p_, t_.rank, t_.b * p_.nodes + n, probability);
  }

  // The token at a depth; `node` is kNone for a recovered or bonus token.
  __forceinline__ __device__ void write(int64_t depth, int64_t node, int64_t token,
                                        double logprob) const {
    if (t_.rank != 0) return;
    const int64_t at = t_.b * (p_.max_depth + 1) + depth;
    put_id(p_.tokens, p_.ids_are_int64, at, token);
    if (node >= 0) put_id(p_.path, p_.parents_are_int64, t_.b * p_.max_depth + depth, node);
    if (p_.logprobs != nullptr) p_.logprobs[at] = static_cast<float>(t_.greedy ? 0.0 : logprob);
  }

  const TreeJob& job_;
  const TreeParams& p_;
  TreeTask& t_;

 private:
  __forceinline__ __device__ void join_last_draft() {
    if (t_.first_draft == t_.last_draft || !p_.draft_rows.given()) return;
    NodeRecord& last = t_.records[t_.last_draft];
    if (last.draft.form == DraftForm::kOneHot) return;
    for (int32_t e = t_.first_draft; e != t_.last_draft; e = t_.records[e].next_draft) {
      if (!same_draft_row(p_, t_.b, e, t_.last_draft)) continue;
      t_.records[e].scale += last.scale;
      t_.records[e].remaining_mass = last.remaining_mass;
      return pop_draft();
    }
  }
};

}  // namespace specdec::cuda
