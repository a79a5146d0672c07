#pragma once
// Verification of a tree of drafted tokens.
#include "specdec/cuda_plan.h"
#include "specdec/host_device.h"
#include "specdec/parallel.h"
#include "specdec/philox.h"
#include "specdec/verification.h"

namespace specdec {

// In the order of TREE_RULES in specdec_kernels/_tree_arguments.py.
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

// Of Q off the tokens that were tried: under it, tails whose exponential is taken for 0 weigh too
// much of what is left, and nothing counts as left to draw from. Lossless, for it asks Q alone.
constexpr double kLeastRest = 1e-26;

// Of a target [B, N+1, V], whose row 0 is the root's and row n+1 that of node n; a draft [B, M, D]
// or flat [M, D], its statistics [B, M] or [M]; and uniforms [B, 2N+1]: the coin of node n, then
// the draw at depth d. At most max_depth+1 tokens are emitted.
struct TreeParams : VerifyParams {
  const void* parents;        // [B, N], strides below
  const int32_t* draft_rows;  // [B, N] contiguous: the row of the law that node n was drawn from;
                              // may be null: n
  void* path;                 // [B, max_depth] contiguous, ids as in parents
  int64_t nodes;              // N
  int64_t max_depth;          // deeper nodes are not judged; at most N
  int64_t stride_parent_sequence, stride_parent;
  bool parents_are_int64;
  TreeRule rule;

  SPECDEC_HD bool reads_draft() const {
    return rule == TreeRule::kMultiDraft || rule == TreeRule::kMultiDraftWor ||
           rule == TreeRule::kTopKPlusOne || rule == TreeRule::kKSeq ||
           rule == TreeRule::kTraversal;
  }
  SPECDEC_HD int64_t id_limit() const { return reads_draft() ? draft.id_limit(vocab) : vocab; }
};

namespace cpu {
void verify_tree(const TreeParams& p, const Parallel& parallel);
}  // namespace cpu

// A cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a cudaStream_t.
namespace cuda {
int plan_verify_tree(const TreeParams& p, const CudaRequest& request, CudaPlan* plan);
int verify_tree(const TreeParams& p, const CudaPlan& plan, void* workspace, void* stream);
}  // namespace cuda

}  // namespace specdec
