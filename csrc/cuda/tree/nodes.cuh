#pragma once
// Which nodes are candidates at a point; for a whole block, which keeps its own sets of nodes.
#include "cuda/tree/sequence.cuh"

namespace specdec::cuda {

class TreeChildren {
 public:
  __device__ TreeChildren(BlockGroup& group, const TreeJob& job)
      : group_(group), job_(job), p_(job.p), t_(group.task<TreeTask>()) {}

  // The children of all nodes that spell the path so far: those of the last candidates whose token
  // is t.x; at the root, of the root.
  __device__ void gather() const {
    uint32_t *const members = t_.sets, *const candidates = members + job_.words();
    const bool root = t_.here < 0;
    if (!root) {
      each([&](int64_t n) { return has(candidates, n) && token(n) == t_.x; }, members);
    }
    const int64_t found = each(
        [&](int64_t n) {
          const int64_t parent = parent_of(p_, t_.b, n);
          return child_of(p_, t_.b, n, parent) &&
                 (parent < 0 ? root : !root && has(members, parent));
        },
        candidates);
    each([&](int64_t n) { return has(candidates, n) && first_of_token(n, candidates); },
         candidates + job_.words());
    if (thread_id() == 0) t_.num_children = found;
  }

  // The first child of `here` after the one at hand.
  __device__ void seek() const {
    uint64_t first = 0;
    int64_t n = (t_.child > t_.here ? t_.child : t_.here) + 1 + thread_id();
    for (; n < t_.nodes && first == 0; n += kThreads) {
      if (child_of(p_, t_.b, n, t_.here)) first = ~static_cast<uint64_t>(n);
    }
    first = group_.max(first);
    if (thread_id() == 0) t_.child = first == 0 ? -1 : static_cast<int64_t>(~first);
  }

  // The candidate whose token is t.token; in rule typical the likeliest above t.bound. Each is told
  // its chance. `but`: a candidate that is left out.
  __device__ void survey(int64_t but) const {
    uint64_t best = 0;
    const bool typical = p_.rule == TreeRule::kTypical && !t_.greedy;
    for (int64_t n = thread_id(); n < t_.nodes; n += kThreads) {
      if (!has(t_.sets + 2 * job_.words(), n) || n == but) continue;
      const int64_t x = token(n);
      bool stands = x == t_.token;
      uint32_t score = 1;
      double chance = stands;
      if (!t_.greedy && p_.rule != TreeRule::kMatch) {
        const float value = x < p_.vocab ? at(t_.row, x) : 0.0f;
        const double p_x = x >= p_.vocab ? 0
                           : t_.direct   ? static_cast<double>(value)
                                         : exp(t_.stats.logprob(value));
        chance = p_x / t_.bound;
        if (typical) {
          stands = p_x > t_.bound;
          chance = stands;
          score = ordered_key(value);
        }
      }
      if (group_.rank == 0 && p_.accept_probs != nullptr) {
        p_.accept_probs[t_.b * p_.nodes + n] = static_cast<float>(chance);
      }
      const uint64_t key = uint64_t{score} << 32 | static_cast<uint32_t>(~n);
      if (stands && key > best) best = key;
    }
    best = group_.max(best);
    if (thread_id() == 0) t_.child = best == 0 ? -1 : int64_t{static_cast<uint32_t>(~best)};
  }

 private:
  __device__ int64_t token(int64_t n) const { return p_.drafted(t_.b, n); }

  static __device__ bool has(const uint32_t* set, int64_t n) {
    return set[n / kLanes] >> (n % kLanes) & 1;
  }

  // The set of nodes for which f holds; returns how many.
  template <class F>
  __device__ int64_t each(F f, uint32_t* set) const {
    int64_t found = 0;
    for (int64_t first = int64_t{warp_id()} * kLanes; first < t_.nodes; first += kThreads) {
      const int64_t n = first + lane_id();
      const bool in = n < t_.nodes && f(n);
      const unsigned word = __ballot_sync(kAllLanes, in);
      if (lane_id() == 0) set[first / kLanes] = word;
      found += in;
    }
    return group_.sum(found);  // and a barrier
  }

  // Without replacement a token may come once from each law.
  __device__ bool first_of_token(int64_t n, const uint32_t* candidates) const {
    const bool by_law = p_.rule == TreeRule::kMultiDraftWor && !t_.greedy;
    const int64_t x = token(n);
    for (int64_t w = 0; w <= n / kLanes; ++w) {
      uint32_t word = candidates[w];
      for (; word != 0; word &= word - 1) {
        const int64_t m = w * kLanes + __ffs(static_cast<int>(word)) - 1;
        if (m >= n) return true;
        if (token(m) == x && (!by_law || same_draft_row(p_, t_.b, n, m))) return false;
      }
    }
    return true;
  }

  BlockGroup& group_;
  const TreeJob& job_;
  const TreeParams& p_;
  TreeTask& t_;
};

}  // namespace specdec::cuda
