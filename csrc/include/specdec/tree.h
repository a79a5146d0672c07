#pragma once
// Verification of a tree of drafted tokens.
#include "specdec/cuda.h"
#include "specdec/draft.h"
#include "specdec/host_device.h"
#include "specdec/parallel.h"
#include "specdec/philox.h"
#include "specdec/sampling.h"

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

struct TreeParams {
  Rows target;        // [B, N+1, V], or ragged [R, V]: then stride_sequence is unused. Row 0 is the
                      // root's, row n+1 that of node n
  DraftSource draft;  // [B, M, D], or flat [M, D]; its statistics [B, M] or [M]
  const int32_t* cu_rows;     // [B+1], may be null: padded
  const void* tokens_in;      // [B, N], strides below
  const void* parents;        // [B, N], strides below
  const int32_t* draft_rows;  // [B, N] contiguous: the row of the law that node n was drawn from;
                              // may be null: n
  const int64_t* seeds;       // [B]
  const int64_t* positions;   // [B]
  const double* uniforms;     // [B, 2N+1] contiguous, may be null: the coin of node n, then the
                              // draw at depth d
  const int64_t* eos_ids;     // [num_eos], may be null
  const int64_t* max_emit;    // [B], may be null
  SamplingParams sampling;    // [B] each
  void* path;                 // [B, max_depth] contiguous, ids as in parents
  void* tokens;               // [B, max_depth+1] contiguous, ids as in tokens_in
  int32_t* num_accepted;      // [B]
  int32_t* status;            // [B]
  float* logprobs;            // [B, max_depth+1] contiguous, may be null
  float* acceptance;          // [B, N] contiguous, may be null
  int64_t batch;
  int64_t nodes;      // N
  int64_t max_depth;  // deeper nodes are not judged; at most N
  int64_t vocab;
  int64_t num_rows;  // R, of the ragged form
  int64_t num_eos;
  int64_t stride_token_sequence, stride_token;
  int64_t stride_parent_sequence, stride_parent;
  float typical_epsilon;
  float typical_delta;
  bool ids_are_int64;
  bool parents_are_int64;
  Kind kind;
  TreeRule rule;

  SPECDEC_HD bool reads_draft() const {
    return rule == TreeRule::kMultiDraft || rule == TreeRule::kMultiDraftWor ||
           rule == TreeRule::kTopKPlusOne || rule == TreeRule::kKSeq ||
           rule == TreeRule::kTraversal;
  }
  SPECDEC_HD int64_t id_limit() const { return reads_draft() ? draft.id_limit(vocab) : vocab; }
};

void verify_tree_cpu(const TreeParams& p, const Parallel& parallel);

// A cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a cudaStream_t.
int plan_verify_tree_cuda(const TreeParams& p, const CudaRequest& request, CudaPlan* plan);
int verify_tree_cuda(const TreeParams& p, const CudaPlan& plan, void* workspace, void* stream);

}  // namespace specdec
