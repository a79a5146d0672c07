#pragma once
// The children that are tried at one step, found by a whole block.
#include "cuda/tree/sequence.cuh"

namespace specdec::cuda {

// Three sets of nodes as bit masks. Nodes with equal paths of tokens continue one text, so the
// children of all of them are tried.
struct NodeSets {
  uint32_t* path_nodes;  // nodes whose path spells the tokens accepted so far
  uint32_t* children;    // children of all path nodes
  uint32_t* distinct;    // children without those that repeat an earlier one

  __device__ NodeSets(uint32_t* sets, int64_t words)
      : path_nodes(sets), children(sets + words), distinct(sets + 2 * words) {}
};

class Siblings {
 public:
  __device__ Siblings(BlockGroup& group, const TreeJob& job)
      : group_(group), job_(job), p_(job.p), t_(group.task<TreeTask>()) {}

  // Finds the children of the path after t.x was accepted, or those of the root.
  __device__ void gather() const {
    const NodeSets sets(t_.node_sets, job_.words());
    const bool root = t_.node < 0;
    if (!root) {
      fill([&](int64_t n) { return has(sets.children, n) && token(n) == t_.x; }, sets.path_nodes);
    }
    const int64_t found = fill(
        [&](int64_t n) {
          const int64_t parent = p_.parent(t_.b, n);
          return is_child(p_, t_.b, n, parent) &&
                 (parent < 0 ? root : !root && has(sets.path_nodes, parent));
        },
        sets.children);
    fill([&](int64_t n) { return has(sets.children, n) && !repeats(n, sets.children); },
         sets.distinct);
    if (thread_id() == 0) t_.num_children = found;
  }

  // Rule traversal: the first child of t.node after t.child.
  __device__ void find_next() const {
    constexpr uint64_t kNoChild = ~uint64_t{0};
    uint64_t first = kNoChild;
    int64_t n = (t_.child > t_.node ? t_.child : t_.node) + 1 + thread_id();
    for (; n < t_.nodes && first == kNoChild; n += kThreads) {
      if (is_child(p_, t_.b, n, t_.node)) first = static_cast<uint64_t>(n);
    }
    first = group_.min(first);
    if (thread_id() == 0) t_.child = first == kNoChild ? kNone : static_cast<int64_t>(first);
  }

  // The child that holds t.token; in rule typical the likeliest child above the bound. Records the
  // acceptance probability of all distinct children but t.last_tried, which has its own already.
  __device__ void compare() const {
    uint64_t best = 0;
    const bool typical = p_.rule == TreeRule::kTypical && !t_.greedy;
    const NodeSets sets(t_.node_sets, job_.words());
    for (int64_t n = thread_id(); n < t_.nodes; n += kThreads) {
      if (!has(sets.distinct, n) || n == t_.last_tried) continue;
      const int64_t x = token(n);
      bool accepted = x == t_.token;
      uint32_t score = 1;
      double probability = accepted;
      if (!t_.greedy && p_.rule != TreeRule::kMatch) {
        const float value = x < p_.vocab ? at(t_.row, x) : 0.0f;
        const double p_x =
            x >= p_.vocab ? 0
            : t_.direct   ? static_cast<double>(value)
                          : fmin(1.0, exp(t_.stats.logprob(value)));  // a sum of rounded weights
        probability = p_x / t_.total_mass;
        if (typical) {
          accepted = p_x > t_.typical_bound;
          probability = accepted;
          score = ordered_key(value);
        }
      }
      record_accept_prob(p_, group_.rank(), t_.b * p_.nodes + n, probability);
      const uint64_t key = uint64_t{score} << 32 | static_cast<uint32_t>(~n);
      if (accepted && key > best) best = key;
    }
    best = group_.max(best);
    if (thread_id() == 0) t_.child = best == 0 ? -1 : int64_t{static_cast<uint32_t>(~best)};
  }

 private:
  __device__ int64_t token(int64_t n) const { return p_.drafted(t_.b, n); }

  static __device__ bool has(const uint32_t* set, int64_t n) {
    return set[n / kLanes] >> (n % kLanes) & 1;
  }

  // Fills a set with the nodes for which f holds; returns how many these are.
  template <class F>
  __device__ int64_t fill(F f, uint32_t* set) const {
    int64_t found = 0;
    for (int64_t first = int64_t{warp_id()} * kLanes; first < t_.nodes; first += kThreads) {
      const int64_t n = first + lane_id();
      const bool in = n < t_.nodes && f(n);
      const unsigned word = __ballot_sync(kAllLanes, in);
      if (lane_id() == 0) set[first / kLanes] = word;
      found += in;
    }
    return group_.sum(found);  // which is also a barrier
  }

  // Whether an earlier child has the token of n. Without replacement only children drawn from one
  // distribution repeat each other.
  __device__ bool repeats(int64_t n, const uint32_t* children) const {
    const bool by_draft = p_.rule == TreeRule::kMultiDraftWor && !t_.greedy;
    const int64_t x = token(n);
    for (int64_t w = 0; w <= n / kLanes; ++w) {
      uint32_t word = children[w];
      for (; word != 0; word &= word - 1) {
        const int64_t m = w * kLanes + __ffs(static_cast<int>(word)) - 1;
        if (m >= n) return false;
        if (token(m) == x && (!by_draft || same_draft_row(p_, t_.b, n, m))) return true;
      }
    }
    return false;
  }

  BlockGroup& group_;
  const TreeJob& job_;
  const TreeParams& p_;
  TreeTask& t_;
};

}  // namespace specdec::cuda
