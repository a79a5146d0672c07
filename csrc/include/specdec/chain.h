#pragma once
// Verification of a chain of drafted tokens.
#include "specdec/cuda.h"
#include "specdec/draft.h"
#include "specdec/host_device.h"
#include "specdec/parallel.h"
#include "specdec/philox.h"
#include "specdec/sampling.h"

namespace specdec {

enum class Rule : int32_t { kToken, kBlock, kGreedy, kMatch, kTypical, kLenient, kSynthetic };

struct ChainParams {
  Rows target;               // [B, gamma+1, V], or ragged [N, V]: then stride_sequence is unused
  DraftSource draft;         // [B, gamma, D], or ragged [N-B, D]; its statistics [B, gamma]
  const int32_t* cu_rows;    // [B+1], may be null: padded
  const void* draft_tokens;  // [B, gamma], strides below
  const int64_t* seeds;      // [B]
  const int64_t* positions;  // [B]
  const double* uniforms;    // [B, gamma+1] contiguous, may be null
  const float* synthetic_rates;  // [gamma], null unless the rule is synthetic
  const int64_t* eos_ids;        // [num_eos], may be null
  const int64_t* max_emit;       // [B], may be null
  SamplingParams sampling;       // [B] each
  void* tokens;                  // [B, gamma+1] contiguous, ids as in draft_tokens
  int32_t* num_accepted;         // [B]
  int32_t* status;               // [B]
  float* logprobs;               // [B, gamma+1] contiguous, may be null
  float* acceptance;             // [B, gamma] contiguous, may be null
  int64_t batch;
  int64_t gamma;
  int64_t vocab;
  int64_t num_rows;  // N, of the ragged form
  int64_t num_eos;
  int64_t stride_token_sequence, stride_token;
  float lenience;
  float typical_epsilon;
  float typical_delta;
  bool ids_are_int64;
  Kind kind;
  Rule rule;

  SPECDEC_HD bool reads_draft() const {
    return rule == Rule::kToken || rule == Rule::kBlock || rule == Rule::kLenient;
  }
  SPECDEC_HD int64_t id_limit() const { return reads_draft() ? draft.id_limit(vocab) : vocab; }
};

void verify_chain_cpu(const ChainParams& p, const Parallel& parallel);

// A cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a cudaStream_t.
int plan_verify_chain_cuda(const ChainParams& p, const CudaRequest& request, CudaPlan* plan);
int verify_chain_cuda(const ChainParams& p, const CudaPlan& plan, void* workspace, void* stream);

}  // namespace specdec
