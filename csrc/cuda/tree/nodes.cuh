#pragma once
// The draft tree of one sequence. Terms used in this directory:
//   node        one drafted token; its number is its place in draft_token_ids
//   root        the text before the draft (node -1); its children are the first drafted tokens
//   child       a node whose parent is the given node or the root; children of one parent are
//               siblings, in the order of their numbers
//   path        nodes from a child of the root downwards; verification accepts one path
//   depth       number of nodes on the path so far; the token at depth d follows d accepted nodes
//   trial       the acceptance test of one sibling; trial 0 is the first sibling tested
//   residual    the target distribution P less the draft distributions Q of rejected siblings,
//               clipped at zero and normalised
//   recovered token   emitted once every child was rejected; rules that read Q draw it from the
//                     residual
//   bonus token       emitted after a path whose last node has no children
#include "cuda/chain/residual.cuh"
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
