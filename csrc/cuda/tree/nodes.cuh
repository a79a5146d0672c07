#pragma once
// The nodes of the draft tree of one sequence, and the children that are tried at one step.
// specdec/tree.h defines the terms.
#include "cuda/row/residual.cuh"
#include "specdec/tree.h"

namespace specdec::cuda {

constexpr int kNone = -1;

// Whether n is a valid, present child of `parent`.
inline __device__ bool is_child(const TreeParams& p, int64_t b, int64_t n, int64_t parent) {
  const int64_t x = p.drafted(b, n);
  return p.parent(b, n) == parent && x != -1 && p.valid_node(n, x, parent);
}

// Whether two nodes were drawn from one distribution. Without replacement their parents must agree
// too, because only siblings of one parent were drawn together.
inline __device__ bool same_draft_row(const TreeParams& p, int64_t b, int64_t n, int64_t m) {
  return p.draft_row(b, n) == p.draft_row(b, m) &&
         (p.rule != TreeRule::kMultiDraftWor || p.parent(b, n) == p.parent(b, m));
}

// Three sets of nodes as bit masks in global memory. Nodes with equal paths of tokens continue one
// text, so the children of all of them are tried. For the whole block.
class NodeSets {
 public:
  __device__ NodeSets(BlockShared& shared, const TreeParams& p, const SequenceState& s,
                      int64_t nodes, uint32_t* sets, int64_t words)
      : shared_(shared), p_(p), s_(s), nodes_(nodes), sets_(sets), words_(words) {}

  // Finds the children of the path after the token x of a child was accepted, or if `root` those of
  // the root. Returns how many they are.
  __device__ int64_t gather(bool root, int64_t x) {
    if (!root) {
      fill([&](int64_t n) { return has(children(), n) && token(n) == x; }, path_nodes());
    }
    const int64_t found = fill(
        [&](int64_t n) {
          const int64_t parent = p_.parent(s_.b, n);
          return is_child(p_, s_.b, n, parent) &&
                 (parent < 0 ? root : !root && has(path_nodes(), parent));
        },
        children());
    fill([&](int64_t n) { return has(children(), n) && !repeats(n); }, distinct());
    return found;
  }

  // The first child after n, or the first that repeats no earlier one; -1 if there is none.
  __device__ int64_t next(int64_t n, bool of_distinct) const {
    const uint32_t* const set = of_distinct ? distinct() : children();
    for (++n; n < nodes_; n = (n / kLanes + 1) * kLanes) {
      const uint32_t word = set[n / kLanes] >> (n % kLanes);
      if (word != 0) return n + __ffs(static_cast<int>(word)) - 1;
    }
    return kNone;
  }
  __device__ bool is_distinct(int64_t n) const { return has(distinct(), n); }

 private:
  // Nodes whose path spells what was accepted, the children of all of them, and those children that
  // repeat no earlier one.
  __device__ uint32_t* path_nodes() const { return sets_; }
  __device__ uint32_t* children() const { return sets_ + words_; }
  __device__ uint32_t* distinct() const { return sets_ + 2 * words_; }

  __device__ int64_t token(int64_t n) const { return p_.drafted(s_.b, n); }

  static __device__ bool has(const uint32_t* set, int64_t n) {
    return set[n / kLanes] >> (n % kLanes) & 1;
  }

  // Fills a set with the nodes for which f holds; returns how many these are.
  template <class F>
  __device__ int64_t fill(const F& f, uint32_t* set) {
    __syncthreads();
    ThreadBlock block(shared_);
    int64_t found = 0;
    for (int64_t first = int64_t{warp_id()} * kLanes; first < nodes_; first += kThreads) {
      const int64_t n = first + lane_id();
      const bool in = n < nodes_ && f(n);
      const unsigned word = __ballot_sync(kAllLanes, in);
      if (lane_id() == 0) set[first / kLanes] = word;
      found += in;
    }
    return block.sum(found);  // which is also a barrier
  }

  // Whether an earlier child has the token of n. Without replacement only children drawn from one
  // distribution repeat each other.
  __device__ bool repeats(int64_t n) const {
    const bool by_draft = p_.rule == TreeRule::kMultiDraftWor && !s_.greedy;
    const int64_t x = token(n);
    for (int64_t w = 0; w <= n / kLanes; ++w) {
      uint32_t word = children()[w];
      for (; word != 0; word &= word - 1) {
        const int64_t m = w * kLanes + __ffs(static_cast<int>(word)) - 1;
        if (m >= n) return false;
        if (token(m) == x && (!by_draft || same_draft_row(p_, s_.b, n, m))) return true;
      }
    }
    return false;
  }

  BlockShared& shared_;
  const TreeParams& p_;
  const SequenceState& s_;
  const int64_t nodes_;
  uint32_t* const sets_;
  const int64_t words_;
};

}  // namespace specdec::cuda
