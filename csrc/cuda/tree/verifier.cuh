#pragma once
// What verdicts on trees are made of, by one thread of each block.
#include "cuda/tree/sequence.cuh"
#include "specdec/acceptance.h"

namespace specdec::cuda {

class TreePoint {
 public:
  __device__ TreePoint(const TreeJob& job, TreeTask& task) : job_(job), p_(job.p), t_(task) {}

 protected:
  __forceinline__ __device__ void finish() { t_.action = TreeAction::kDone; }

  // The first candidate after n, or -1; one whose token no earlier one has.
  __forceinline__ __device__ int64_t next(int64_t n, bool distinct) const {
    const uint32_t* const set = t_.sets + (distinct ? 2 : 1) * job_.words();
    for (++n; n < t_.nodes; n = (n / kLanes + 1) * kLanes) {
      const uint32_t word = set[n / kLanes] >> (n % kLanes);
      if (word != 0) return n + __ffs(static_cast<int>(word)) - 1;
    }
    return -1;
  }

  // Whether nothing follows the node at hand.
  __forceinline__ __device__ bool over() const {
    if (t_.depth >= t_.most) return true;
    return t_.here >= 0 && is_eos(p_, p_.drafted(t_.b, t_.here));
  }

  __forceinline__ __device__ void take_row() {
    const Read read = p_.kind == Kind::kLogits ? Read::kLogits
                      : t_.direct || t_.greedy ? Read::kProbs
                                               : Read::kLogOfProbs;
    const TargetRow at = target_row(p_, t_, t_.here + 1);
    t_.row = RowView(p_.target, at.sequence, at.row, p_.vocab, read);
  }

  // Two slots take turns: a block that is ahead fills one while others still read the other.
  __forceinline__ __device__ void measure_target(TreeState state) {
    take_row();
    t_.turn ^= 1;
    t_.tile_stats = job_.tile_stats_array[t_.context * job_.context_tile_stats() + t_.turn];
    t_.source = t_.row;
    t_.sink = t_.tile_stats;
    t_.of_draft = false;
    t_.state = state;
    t_.action = TreeAction::kMeasure;
  }

  // What the candidate's draft is asked for, if anything.
  __forceinline__ __device__ void measure_draft(TreeState state) {
    t_.state = state;
    if (!t_.draft.unmeasured()) {
      const bool looks_up = t_.draft.form == DraftForm::kSparse && !t_.draft.fault;
      t_.action = looks_up ? TreeAction::kLookUp : TreeAction::kThink;
      return;
    }
    t_.draft_turn ^= 1;
    t_.source = t_.draft.row;
    t_.sink = job_.tile_stats_array[t_.context * job_.context_tile_stats() + 2 + t_.draft_turn];
    t_.of_draft = true;
    t_.action = TreeAction::kMeasure;
  }

  // Goes on without an action.
  __forceinline__ __device__ void think(TreeState state) {
    t_.state = state;
    t_.action = TreeAction::kThink;
  }

  __forceinline__ __device__ void scan(Scan what, TreeState state) {
    t_.scan = what;
    t_.state = state;
    t_.action = TreeAction::kScan;
  }

  __forceinline__ __device__ void look(TreeState state) {
    t_.state = state;
    t_.action = TreeAction::kLook;
  }

  __forceinline__ __device__ void draw(bool residual) {
    t_.residual = residual;
    t_.state = TreeState::kAnswer;
    t_.action = TreeAction::kDraw;
  }

  // Q of the candidate, or of an entry at its token; as it was measured, if an entry has its law.
  __forceinline__ __device__ void open(int32_t entry = kNone) {
    t_.x = p_.drafted(t_.b, t_.child);
    open_draft(p_, t_, entry < 0 ? t_.child : entry, t_.x, t_.draft);
    const int32_t twin = entry < 0 ? twin_of(t_.child) : entry;
    if (!t_.draft.unmeasured() || twin < 0) return;
    copy(t_.q_stats, t_.records[twin].q_stats);
    t_.draft.checked = true;
    t_.draft.set(t_.q_stats);
  }

  // The last entry that has the law of node n, or none.
  __forceinline__ __device__ int32_t twin_of(int64_t n) const {
    int32_t found = kNone;
    if (p_.draft_rows == nullptr || t_.draft.form == DraftForm::kOneHot) return found;
    for (int32_t e = t_.first; e >= 0; e = t_.records[e].next) {
      if (same_draft_row(p_, t_.b, e, n)) found = e;
    }
    return found;
  }

  // One more entry. The one before it stood apart from another of its law, and joins it now.
  __forceinline__ __device__ void append(int64_t n, double scale) {
    join_last();
    TreeRecord& r = keep_draft(n);
    r.scale = static_cast<float>(scale);
    r.next = kNone;
    (t_.first < 0 ? t_.first : t_.records[t_.last].next) = static_cast<int32_t>(n);
    t_.last = static_cast<int32_t>(n);
  }

  __forceinline__ __device__ TreeRecord& keep_draft(int64_t n) {
    TreeRecord& r = t_.records[n];
    copy(r.draft, t_.draft);
    copy(r.q_stats, t_.q_stats);
    return r;
  }

  __forceinline__ __device__ void remove_last() {
    int32_t before = kNone;
    for (int32_t e = t_.first; e != t_.last; e = t_.records[e].next) before = e;
    (before < 0 ? t_.first : t_.records[before].next) = kNone;
    t_.last = before;
  }

  __forceinline__ __device__ void remove_all() { t_.first = t_.last = kNone; }

  __forceinline__ __device__ bool accepts(double l) const {
    const DraftDistribution& draft = t_.draft;
    const double u = accept_uniform(p_, t_, t_.child, t_.depth, t_.lane);
    if (t_.direct) {
      return decide(accept_ratio(u, t_.x < p_.vocab ? at(t_.row, t_.x) : 0.0f, l * draft.q_x));
    }
    return decide(accept_log_ratio(u, target_logprob(t_.x), log(l) + draft.log_q_x));
  }

  __forceinline__ __device__ bool decide(const Acceptance& a) const {
    record_accept_prob(t_.child, a.probability);
    return a.accepted;
  }

  __forceinline__ __device__ double target_logprob(int64_t token) const {
    return token < p_.vocab ? t_.stats.logprob(at(t_.row, token)) : -INFINITY;
  }

  // The probability with which a node was to stand.
  __forceinline__ __device__ void record_accept_prob(int64_t n, double probability) const {
    if (t_.rank != 0 || p_.accept_probs == nullptr) return;
    p_.accept_probs[t_.b * p_.nodes + n] = recorded_accept_prob(probability);
  }

  // The token at a depth, and the node that it is.
  __forceinline__ __device__ void write(int64_t depth, int64_t node, int64_t token,
                                        double logprob) const {
    if (t_.rank != 0) return;
    const int64_t at = t_.b * (p_.max_depth + 1) + depth;
    put_id(p_.tokens, p_.ids_are_int64, at, token);
    if (node >= 0) put_id(p_.path, p_.parents_are_int64, t_.b * p_.max_depth + depth, node);
    if (p_.logprobs != nullptr) p_.logprobs[at] = static_cast<float>(t_.greedy ? 0.0 : logprob);
  }

  __forceinline__ __device__ void end(int64_t token) {
    write(t_.depth, kNone, token, target_logprob(token));
    finish();
  }

  const TreeJob& job_;
  const TreeParams& p_;
  TreeTask& t_;

 private:
  __forceinline__ __device__ void join_last() {
    if (t_.first == t_.last || p_.draft_rows == nullptr) return;
    TreeRecord& last = t_.records[t_.last];
    if (last.draft.form == DraftForm::kOneHot) return;
    for (int32_t e = t_.first; e != t_.last; e = t_.records[e].next) {
      if (!same_draft_row(p_, t_.b, e, t_.last)) continue;
      t_.records[e].scale += last.scale;
      t_.records[e].rest = last.rest;
      return remove_last();
    }
  }
};

}  // namespace specdec::cuda
