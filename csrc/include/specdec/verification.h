#pragma once
// The parameters that verify_chain and verify_tree have in common. Words used throughout:
//   target, draft    the model to be sampled from, and the drafter; their distributions are P and Q
//   sequence         one request of the batch
//   row              the logits or probabilities of one position, V numbers
//   accepted         said of a drafted token that is emitted
//   recovered token  the token emitted after a rejection: drawn from the residual where the rule
//                    compares P with Q, else from P, or the target's own choice (greedy, match)
//   bonus token      the token that follows when every draft was accepted
//   residual         max(P - Q, 0), normalised; rules block and traversal scale P in it, rule
//                    lenient scales Q
#include "specdec/draft.h"

namespace specdec {

struct VerifyParams {
  Rows target;  // [B, rows, V], or ragged [R, V], where stride_sequence is unused
  DraftParams draft;
  Integers target_indptr;         // [B+1] first row of each sequence in a ragged target, else none
  const void* draft_token_ids;    // [B, drafts], strides below
  Integers draft_rows;            // [B, drafts] the draft row that each was drawn from, else none
  const int64_t* seeds;           // [B]
  const int64_t* positions;       // [B]
  const double* uniforms;         // [B, uniforms_per_sequence()] contiguous, may be null
  const int64_t* eos_token_ids;   // [num_eos], may be null
  const int64_t* max_new_tokens;  // [B], may be null
  SamplingParams sampling;        // [B] each
  void* tokens;                   // [B, most tokens emitted] contiguous, dtype of draft_token_ids
  int32_t* num_accepted;          // [B]
  int32_t* status;                // [B]
  float* logprobs;                // like tokens, may be null
  float* accept_probs;            // [B, drafts] contiguous, may be null
  int64_t batch;
  int64_t vocab;
  int64_t num_rows;  // R, if ragged: rows of all sequences together
  int64_t num_eos;
  int64_t stride_token_sequence, stride_token;
  float typical_epsilon;
  float typical_delta;
  bool ids_are_int64;
  Kind kind;

  SPECDEC_HD int64_t drafted(int64_t b, int64_t i) const {
    const int64_t at = b * stride_token_sequence + i * stride_token;
    return Integers{draft_token_ids, ids_are_int64}[at];
  }
};

}  // namespace specdec
