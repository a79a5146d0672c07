#pragma once
// The target row that decides about a drafted token, and the record of the decision. Chains and
// trees share these.
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

// Writes entry `at` of accept_probs; only the first block of a group does.
__forceinline__ __device__ void record_accept_prob(const VerifyParams& p, unsigned rank, int64_t at,
                                                   double probability) {
  if (rank != 0 || p.accept_probs == nullptr) return;
  p.accept_probs[at] = recorded_accept_prob(probability);
}

}  // namespace specdec::cuda
