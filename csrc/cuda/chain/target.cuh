#pragma once
// The target row that decides about a drafted token, the tests of that token, and the record of
// their result. Chains and trees share these.
#include "cuda/row/draft.cuh"
#include "specdec/acceptance.h"
#include "specdec/sequence.h"

namespace specdec::cuda {

// Target row i of a sequence.
__forceinline__ __device__ RowView target_row(const VerifyParams& p, const SequenceState& s,
                                              int64_t i) {
  const Read read = p.kind == Kind::kLogits ? Read::kLogits
                    : s.direct || s.greedy  ? Read::kProbs
                                            : Read::kLogOfProbs;
  const RowIndex at = target_row_index(p, s, i);
  return RowView(p.target, at.sequence, at.row, p.vocab, read);
}

__forceinline__ __device__ double target_logprob(const RowView& row, const RowStats& stats,
                                                 int64_t token) {
  return token < row.vocab ? stats.logprob(at(row, token)) : -INFINITY;
}

// The ratio test of a drafted token with the acceptance uniform u; `scale` is the factor of Q.
__forceinline__ __device__ Acceptance test_draft(const SequenceState& s, const RowView& row,
                                                 const RowStats& stats, int64_t token, double u,
                                                 double scale, const DraftDistribution& draft) {
  const float p_x = s.direct && token < row.vocab ? at(row, token) : 0.0f;
  const double log_p = s.direct ? -INFINITY : target_logprob(row, stats, token);
  return accept_draft(s.direct, u, p_x, log_p, scale, draft);
}

// Writes entry `at` of accept_probs; only the first block of a group does.
__forceinline__ __device__ void record_accept_prob(const VerifyParams& p, unsigned rank, int64_t at,
                                                   double probability) {
  if (rank != 0 || p.accept_probs == nullptr) return;
  p.accept_probs[at] = recorded_accept_prob(probability);
}

}  // namespace specdec::cuda
