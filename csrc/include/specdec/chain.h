#pragma once
// Verification of a chain of drafted tokens.
#include "specdec/parallel.h"
#include "specdec/philox.h"
#include "specdec/sampling.h"

namespace specdec {

enum class Rule : int32_t { kToken, kGreedy, kMatch };
enum class Kind : int32_t { kLogits, kProbs };

struct ChainParams {
  Rows target;      // [B, gamma+1, V], or ragged [N, V]: then stride_sequence is unused
  Rows draft;       // [B, gamma, V], or ragged [N-B, V]
  bool point_mass;  // no draft row: each drafted token was certain
  bool draft_ragged;
  const int32_t* cu_rows;           // [B+1], may be null: padded
  const void* draft_tokens;         // [B, gamma], strides below
  const double* draft_logsumexp;    // [B, gamma] contiguous, may be null: not a SampledDraft
  const float* draft_threshold;     // [B, gamma] contiguous, null with draft_logsumexp
  const float* draft_temperatures;  // [B], may be null
  const int64_t* seeds;             // [B]
  const int64_t* positions;         // [B]
  const double* uniforms;           // [B, gamma+1] contiguous, may be null
  SamplingParams sampling;          // [B] each
  void* tokens;                     // [B, gamma+1] contiguous, ids as in draft_tokens
  int32_t* num_accepted;            // [B]
  int32_t* status;                  // [B]
  float* logprobs;                  // [B, gamma+1] contiguous
  int64_t batch;
  int64_t gamma;
  int64_t vocab;
  int64_t num_rows;        // N, of the ragged form
  int64_t num_draft_rows;  // N-B, of the ragged draft
  int64_t stride_token_sequence, stride_token;
  float draft_temperature;
  bool ids_are_int64;
  Kind kind;
  Rule rule;
};

void verify_chain_cpu(const ChainParams& p, const Parallel& parallel);

}  // namespace specdec
