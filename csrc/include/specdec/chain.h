#pragma once
// Verification of a chain of drafted tokens.
#include "specdec/cuda.h"
#include "specdec/host_device.h"
#include "specdec/parallel.h"
#include "specdec/philox.h"
#include "specdec/sampling.h"

namespace specdec {

enum class Rule : int32_t { kToken, kBlock, kGreedy, kMatch, kTypical, kLenient, kSynthetic };
enum class Kind : int32_t { kLogits, kProbs };
// What the draft's law is made of: nothing (each drafted token was certain), rows of what `kind`
// says, logits with what sample left behind, or a few ids with their probabilities.
enum class DraftForm : int32_t { kPointMass, kRows, kSampled, kSparse };

struct ChainParams {
  Rows target;  // [B, gamma+1, V], or ragged [N, V]: then stride_sequence is unused
  Rows draft;   // [B, gamma, D], or ragged [N-B, D]
  DraftForm draft_form;
  bool draft_ragged;
  int64_t draft_vocab;           // D: columns of a draft row, or ids of a sparse one
  const int32_t* draft_columns;  // [V] column of each token, outside [0, D): none; may be null: v
  const void* draft_ids;         // [B, gamma, D] or [N-B, D] contiguous, null unless sparse
  bool draft_ids_are_int64;
  const int32_t* cu_rows;           // [B+1], may be null: padded
  const void* draft_tokens;         // [B, gamma], strides below
  const double* draft_logsumexp;    // [B, gamma] contiguous, null unless sampled
  const float* draft_threshold;     // [B, gamma] contiguous, null unless sampled
  const float* draft_temperatures;  // [B], may be null
  const int64_t* seeds;             // [B]
  const int64_t* positions;         // [B]
  const double* uniforms;           // [B, gamma+1] contiguous, may be null
  const float* synthetic_rates;     // [gamma], null unless the rule is synthetic
  const int64_t* eos_ids;           // [num_eos], may be null
  const int64_t* max_emit;          // [B], may be null
  SamplingParams sampling;          // [B] each
  void* tokens;                     // [B, gamma+1] contiguous, ids as in draft_tokens
  int32_t* num_accepted;            // [B]
  int32_t* status;                  // [B]
  float* logprobs;                  // [B, gamma+1] contiguous, may be null
  float* acceptance;                // [B, gamma] contiguous, may be null
  int64_t batch;
  int64_t gamma;
  int64_t vocab;
  int64_t num_rows;        // N, of the ragged form
  int64_t num_draft_rows;  // N-B, of the ragged draft
  int64_t num_eos;
  int64_t stride_token_sequence, stride_token;
  float draft_temperature;
  float lenience;
  float typical_epsilon;
  float typical_delta;
  bool ids_are_int64;
  Kind kind;
  Rule rule;

  SPECDEC_HD bool reads_draft() const {
    return rule == Rule::kToken || rule == Rule::kBlock || rule == Rule::kLenient;
  }
  // Drafted ids below it are judged: a draft with a larger vocabulary may propose what the target
  // cannot say, and that is a rejection like any other.
  SPECDEC_HD int64_t id_limit() const {
    const bool own = draft_form == DraftForm::kRows || draft_form == DraftForm::kSampled;
    return reads_draft() && own && draft_columns == nullptr && draft_vocab > vocab ? draft_vocab
                                                                                   : vocab;
  }
};

void verify_chain_cpu(const ChainParams& p, const Parallel& parallel);

// A cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a cudaStream_t.
int plan_verify_chain_cuda(const ChainParams& p, const CudaRequest& request, CudaPlan* plan);
int verify_chain_cuda(const ChainParams& p, const CudaPlan& plan, void* workspace, void* stream);

}  // namespace specdec
