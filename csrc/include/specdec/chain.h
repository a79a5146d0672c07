#pragma once
// Verification of a chain of drafted tokens.
#include "specdec/cuda_plan.h"
#include "specdec/host_device.h"
#include "specdec/parallel.h"
#include "specdec/philox.h"
#include "specdec/verification.h"

namespace specdec {

enum class Rule : int32_t { kToken, kBlock, kGreedy, kMatch, kTypical, kLenient, kSynthetic };

// Of a target [B, gamma+1, V], a draft [B, gamma, D] or ragged [R-B, D], its statistics [B, gamma],
// and uniforms [B, gamma+1]; at most gamma+1 tokens are emitted.
struct ChainParams : VerifyParams {
  const float* synthetic_rates;  // [gamma], null unless the rule is synthetic
  int64_t gamma;
  float lenience;  // 1 unless the rule is lenient
  Rule rule;

  SPECDEC_HD bool reads_draft() const {
    return rule == Rule::kToken || rule == Rule::kBlock || rule == Rule::kLenient;
  }
  SPECDEC_HD int64_t id_limit() const { return reads_draft() ? draft.id_limit(vocab) : vocab; }
};

namespace cpu {
void verify_chain(const ChainParams& p, const Parallel& parallel);
}  // namespace cpu

// A cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a cudaStream_t.
namespace cuda {
int plan_verify_chain(const ChainParams& p, const CudaRequest& request, CudaPlan* plan);
int verify_chain(const ChainParams& p, const CudaPlan& plan, void* workspace, void* stream);
}  // namespace cuda

}  // namespace specdec
