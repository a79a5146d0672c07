#pragma once
// The nodes of the draft tree of one sequence. specdec/tree.h defines the terms.
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

}  // namespace specdec::cuda
