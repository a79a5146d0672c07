#pragma once
// What the two ways through a tree have in common: TopDown (decide.cuh) accepts a child of each
// node from the root down, Traversal (traversal.cuh) tests nodes from the leaves up. One block goes
// through a sequence: all its threads follow the same path, and where only one decides, `by_one`
// tells the others. csrc/cpu/tree decides the same.
#include "cuda/tree/residual.cuh"

namespace specdec::cuda {

// Makes the row after a node the current one, from which nothing is subtracted yet. For one thread.
inline SPECDEC_NOINLINE __device__ void open_step(const TreeJob& job, int64_t node, int64_t depth,
                                                  double target_scale) {
  const TreeSequence& q = shared_memory<TreeShared>()->sequence;
  TreeStep& t = shared_memory<TreeShared>()->step;
  t.node = node;
  t.depth = depth;
  t.row = row_after(job.p, q, node);
  t.target = job.summaries[job.target_slot(q.b, node)];
  t.target_scale = target_scale;
  t.scaled = ScaledTarget(t.target.stats, q.direct, target_scale);
  t.residual_mass = 1;
  t.num_excluded = 0;
  t.first_draft = t.last_draft = kNone;
}

// Q of node `from` at the token of child n. For one thread.
inline SPECDEC_NOINLINE __device__ void open_child(const TreeJob& job, int64_t n, int64_t from) {
  const TreeSequence& q = shared_memory<TreeShared>()->sequence;
  TreeStep& t = shared_memory<TreeShared>()->step;
  t.child = n;
  t.x = job.p.drafted(q.b, n);
  open_draft(job, q, from, t.x, t.draft);
}

// Draws from P. For the whole block.
inline SPECDEC_NOINLINE __device__ int64_t draw_target(const TreeJob& job) {
  __syncthreads();
  ThreadBlock block(*shared_memory<TreeShared>());
  const TreeSequence& q = shared_memory<TreeShared>()->sequence;
  const TreeStep& t = shared_memory<TreeShared>()->step;
  const int64_t token = draw_measured(
      block, t.row, t.target, job.tile_stats[job.target_slot(q.b, t.node)], job.list(q.b, t.node),
      candidates_of<TreeShared>(), residual_uniform(job.p, q, t.depth));
  __syncthreads();
  return token;
}

class TreeVerifier {
 public:
  __device__ TreeVerifier(const TreeJob& job, TreeShared& shared)
      : job_(job), p_(job.p), s_(shared), q_(shared.sequence), t_(shared.step) {}

 protected:
  // What f returns to the first thread, for all. What it writes is visible to all.
  template <class F>
  __device__ auto by_one(const F& f) -> decltype(f()) {
    using T = decltype(f());
    static_assert(sizeof(T) <= sizeof(int64_t), "fits");
    __syncthreads();
    auto* const place = reinterpret_cast<T*>(s_.broadcast);
    if (thread_id() == 0) *place = f();
    __syncthreads();
    const T value = *place;
    __syncthreads();
    return value;
  }
  template <class F>
  __device__ void one(const F& f) const {
    __syncthreads();
    if (thread_id() == 0) f();
    __syncthreads();
  }

  // For one fold or more: made anew behind a barrier, it needs no register in between.
  __device__ ThreadBlock block() const {
    __syncthreads();
    return ThreadBlock(s_);
  }

  __device__ NodeRecord* records() const { return job_.records_of(q_.b); }

  // Whether no token follows a node: it is an end-of-sequence token or the last one allowed.
  __device__ bool ends_at(int64_t depth, int64_t node) const {
    return depth >= q_.max_tokens || (node >= 0 && is_eos(p_, p_.drafted(q_.b, node)));
  }

  // Adds the child's draft to those that are subtracted. The last one always has a record of its
  // own, because subtraction is clipped and a scan subtracts it after all others; the one that was
  // last so far is now joined with an earlier record of the same distribution. For one thread.
  __device__ void push_draft(double scale) const {
    join_last_draft();
    const auto n = static_cast<int32_t>(t_.child);
    NodeRecord& r = records()[n];
    r.draft = t_.draft;
    r.scale = static_cast<float>(scale);
    r.next_draft = kNone;
    (t_.first_draft < 0 ? t_.first_draft : records()[t_.last_draft].next_draft) = n;
    t_.last_draft = n;
  }

  __device__ void pop_draft() const {
    int32_t before = kNone;
    for (int32_t e = t_.first_draft; e != t_.last_draft; e = records()[e].next_draft) before = e;
    (before < 0 ? t_.first_draft : records()[before].next_draft) = kNone;
    t_.last_draft = before;
  }

  __device__ void clear_drafts() const { t_.first_draft = t_.last_draft = kNone; }

  // The last subtracted draft that is the distribution node n was drawn from, or kNone.
  __device__ int32_t same_draft_as(int64_t n) const {
    int32_t found = kNone;
    if (!p_.draft_rows.given()) return found;
    for (int32_t e = t_.first_draft; e >= 0; e = records()[e].next_draft) {
      if (records()[e].draft.form != DraftForm::kOneHot && same_draft_row(p_, q_.b, e, n))
        found = e;
    }
    return found;
  }

  __device__ int64_t draw_target() const { return cuda::draw_target(job_); }
  // Leaves the sums of the residual in the step.
  __device__ void sum_residual(ScanKind kind) const { scan(job_, kind, ScanUse::kSum, 0); }
  // The residual at the child's token.
  __device__ float residual_at_child(ScanKind kind) const {
    scan(job_, kind, ScanUse::kRead, 0);
    return t_.residual_at_x;
  }
  // Draws from the residual that was summed last.
  __device__ int64_t draw_residual(ScanKind kind) const {
    return scan(job_, kind, ScanUse::kDraw, residual_uniform(p_, q_, t_.depth));
  }

  __device__ double target_logprob(int64_t token) const {
    return token < p_.vocab ? t_.target.stats.logprob(at(t_.row, token)) : -INFINITY;
  }

  __device__ void report(int32_t status) const {
    if (thread_id() == 0) q_.status |= status;
  }
  // That the row after the last node of the path is not valid.
  __device__ void report_target() const {
    if (thread_id() == 0) q_.status |= target_fault(p_, q_, t_.node + 1);
  }

  // For one thread.
  __device__ void record_accept_prob(int64_t n, double probability) const {
    if (p_.accept_probs == nullptr) return;
    p_.accept_probs[q_.b * p_.nodes + n] = recorded_accept_prob(probability);
  }

  // The token at a depth; `node` is kNone for a recovered or bonus token. For one thread.
  __device__ void write(int64_t depth, int64_t node, int64_t token, double logprob) const {
    const int64_t at = q_.b * (p_.max_depth + 1) + depth;
    put_id(p_.tokens, p_.ids_are_int64, at, token);
    if (node >= 0) put_id(p_.path, p_.parents_are_int64, q_.b * p_.max_depth + depth, node);
    if (p_.logprobs != nullptr) p_.logprobs[at] = static_cast<float>(q_.greedy ? 0.0 : logprob);
  }

  // The token that ends the path. For the whole block.
  __device__ void emit(int64_t token) const {
    __syncthreads();
    if (thread_id() == 0) write(t_.depth, kNone, token, target_logprob(token));
  }

  const TreeJob& job_;
  const TreeParams& p_;
  TreeShared& s_;
  TreeSequence& q_;
  TreeStep& t_;

 private:
  __device__ void join_last_draft() const {
    if (t_.first_draft == t_.last_draft || !p_.draft_rows.given()) return;
    NodeRecord& last = records()[t_.last_draft];
    if (last.draft.form == DraftForm::kOneHot) return;
    for (int32_t e = t_.first_draft; e != t_.last_draft; e = records()[e].next_draft) {
      if (!same_draft_row(p_, q_.b, e, t_.last_draft)) continue;
      records()[e].scale += last.scale;
      records()[e].remaining_mass = last.remaining_mass;
      return pop_draft();
    }
  }
};

}  // namespace specdec::cuda
