#pragma once
// Verification of a chain of drafted tokens. docs/rules.md explains the rules.
#include "specdec/host_device.h"
#include "specdec/parallel.h"
#include "specdec/sequence.h"
#include "specdec/verification.h"

namespace specdec {

// In the order of RULES in specdec_kernels/arguments/rules.py.
enum class Rule : int32_t {
  kToken,
  kBlock,
  kGreedy,
  kMatch,
  kTypical,
  kLenient,
  kSynthetic,
  kTopBeta
};
constexpr Rule kLastRule = Rule::kTopBeta;

// The target is [B, gamma+1, V], or ragged [R, V] with the R rows of all sequences; the draft is
// [B, gamma, D], or ragged [R-B, D], because the last row of a sequence has no draft. The draft's
// statistics are [B, gamma]. With `draft_rows` the draft is [B, M, D] or [M, D], its statistics
// [B, M] or [M]. The uniforms are [B, gamma+1]. At most gamma+1 tokens are emitted.
struct ChainParams : VerifyParams {
  const float* synthetic_rates;  // [gamma], null unless the rule is synthetic
  int64_t gamma;
  float lenience;         // 1 unless the rule is lenient
  int64_t top_beta_rank;  // rule top_beta
  float top_beta_distance;
  Rule rule;

  SPECDEC_HD bool reads_draft() const {
    return rule == Rule::kToken || rule == Rule::kBlock || rule == Rule::kLenient;
  }
  SPECDEC_HD int64_t id_limit() const { return reads_draft() ? draft.id_limit(vocab) : vocab; }
  SPECDEC_HD int64_t uniforms_per_sequence() const { return gamma + 1; }
};

// The row of the draft that draft i was drawn from, and the place of its statistics.
SPECDEC_HD inline int64_t draft_row(const ChainParams& p, const SequenceState& s, int64_t i) {
  if (p.draft_rows.given()) return p.draft_rows[s.b * p.gamma + i];
  return p.draft.flat ? s.begin - s.b + i : i;
}
SPECDEC_HD inline int64_t draft_statistic(const ChainParams& p, const SequenceState& s, int64_t i) {
  return p.draft_rows.given() ? p.draft.place(s.b, draft_row(p, s, i)) : s.b * p.gamma + i;
}

SPECDEC_HD inline double accept_uniform(const ChainParams& p, const SequenceState& s, int64_t i) {
  return uniform_at(p, s, s.b * p.uniforms_per_sequence() + i, i, kAcceptStream);
}
// Rule block looks ahead: a uniform may have influenced tokens emitted before its own position. The
// next round must not meet it again, so it belongs to the position where this round began.
SPECDEC_HD inline double block_accept_uniform(const ChainParams& p, const SequenceState& s,
                                              int64_t i) {
  return uniform_at(p, s, s.b * p.uniforms_per_sequence() + i, 0, kAcceptStream, i);
}
SPECDEC_HD inline double residual_uniform(const ChainParams& p, const SequenceState& s, int64_t i) {
  return uniform_at(p, s, s.b * p.uniforms_per_sequence() + p.gamma, i, kResidualStream);
}

namespace cpu {
void verify_chain(const ChainParams& p, const Parallel& parallel);
}  // namespace cpu

// A cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a cudaStream_t.
namespace cuda {
int64_t workspace_bytes(const ChainParams& p);  // device memory, which need not be cleared
int verify_chain(const ChainParams& p, void* workspace, void* stream);
}  // namespace cuda

}  // namespace specdec
