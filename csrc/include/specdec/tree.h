#pragma once
// Verification of a tree of drafted tokens. docs/rules.md explains the rules.
//   node      a drafted token; its number is its place in draft_token_ids
//   root      the last token before the draft, node -1
//   child     a node whose parent is the given node or the root; children of one parent are
//             siblings, in the order of their numbers
//   path      nodes from a child of the root downwards; verification accepts one path
//   depth     the number of nodes on the path before a token: the token at depth d follows d
//             accepted nodes
//   trial     the acceptance test of one sibling; trial 0 is the first sibling tested
//   residual  the target distribution P less the draft distributions Q of the rejected siblings,
//             clipped at zero and normalised
//   recovered token   the token emitted once every child was rejected; rules that read Q draw it
//                     from the residual
//   bonus token       the token emitted after a path whose last node has no children
#include "specdec/host_device.h"
#include "specdec/parallel.h"
#include "specdec/sequence.h"
#include "specdec/verification.h"

namespace specdec {

// In the order of TREE_RULES in specdec_kernels/arguments/rules.py.
enum class TreeRule : int32_t {
  kGreedy,
  kMatch,
  kTargetOnly,
  kMultiDraft,
  kMultiDraftWor,
  kTopKPlusOne,
  kKSeq,
  kTraversal,
  kTypical
};

// The least mass of Q outside the tokens already tried that counts as something to draw from. Below
// it the tails whose exponential is taken as 0 matter too much. This is lossless, because the
// choice depends on Q alone.
constexpr double kLeastMass = 1e-26;

// The target is [B, N+1, V]: row 0 follows the root, row n+1 follows node n. The draft is [B, M, D]
// or flat [M, D], its statistics [B, M] or [M]. The uniforms are [B, 2N+1]: the acceptance uniform
// of each node, then the uniform of the draw at each depth. At most max_depth+1 tokens are emitted.
struct TreeParams : VerifyParams {
  const void* parents;  // [B, N], strides below
  void* path;           // [B, max_depth] contiguous, ids as in parents
  int64_t nodes;        // N
  int64_t max_depth;    // deeper nodes are ignored; at most N
  int64_t stride_parent_sequence, stride_parent;
  bool parents_are_int64;
  TreeRule rule;

  SPECDEC_HD bool reads_draft() const {
    return rule == TreeRule::kMultiDraft || rule == TreeRule::kMultiDraftWor ||
           rule == TreeRule::kTopKPlusOne || rule == TreeRule::kKSeq ||
           rule == TreeRule::kTraversal;
  }
  SPECDEC_HD int64_t id_limit() const { return reads_draft() ? draft.id_limit(vocab) : vocab; }
  SPECDEC_HD int64_t uniforms_per_sequence() const { return 2 * nodes + 1; }

  SPECDEC_HD int64_t parent(int64_t b, int64_t n) const {
    const int64_t at = b * stride_parent_sequence + n * stride_parent;
    return Integers{parents, parents_are_int64}[at];
  }
  SPECDEC_HD bool valid_node(int64_t n, int64_t token, int64_t parent) const {
    return parent >= -1 && parent < n && token >= -1 && token < id_limit();
  }
  // The row of the draft that node n was drawn from.
  SPECDEC_HD int64_t draft_row(int64_t b, int64_t n) const {
    return draft_rows.given() ? draft_rows[b * nodes + n] : n;
  }
};

// The acceptance uniform of one trial. Rule traversal looks ahead, so its uniforms belong to depth
// 0 of the round, and `trial` is the node itself.
SPECDEC_HD inline double accept_uniform(const TreeParams& p, const SequenceState& s, int64_t node,
                                        int64_t depth, int64_t trial) {
  return uniform_at(p, s, s.b * p.uniforms_per_sequence() + node, depth, kAcceptStream, trial);
}
SPECDEC_HD inline double residual_uniform(const TreeParams& p, const SequenceState& s,
                                          int64_t depth) {
  return uniform_at(p, s, s.b * p.uniforms_per_sequence() + p.nodes + depth, depth,
                    kResidualStream);
}

namespace cpu {
void verify_tree(const TreeParams& p, const Parallel& parallel);
}  // namespace cpu

// A cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a cudaStream_t.
namespace cuda {
int64_t workspace_bytes(const TreeParams& p);  // device memory, which need not be cleared
int verify_tree(const TreeParams& p, void* workspace, void* stream);
}  // namespace cuda

}  // namespace specdec
