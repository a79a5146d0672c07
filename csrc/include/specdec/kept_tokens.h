#pragma once
// The tokens that the filters keep of target rows, the likeliest first. A token is *kept* if its
// logit reaches the threshold of the row and P is not 0 in a double.
#include <cmath>

#include "specdec/draft.h"
#include "specdec/filter.h"
#include "specdec/ids.h"
#include "specdec/ordered_key.h"
#include "specdec/parallel.h"
#include "specdec/sequence_params.h"

namespace specdec {

constexpr int64_t kMostKept = 1024;  // that a row returns

// N = B * rows_each() rows of output.
struct KeptTokensParams {
  Rows target;               // [B, n, V], [B, V], or ragged [R, V], where stride_sequence is unused
  SamplingParams sampling;   // [B] each
  Integers target_indptr;    // [B+1] first row of each sequence in a ragged target, else none
  Ids rows;                  // [B, E] rows of a sequence, -1 for none; without data row e is e
  int64_t* ids;              // [N, max_kept], then -1
  float* logprobs;           // [N, max_kept], then -inf
  int32_t* counts;           // [N] all that are kept
  int32_t* status;           // [N]
  int64_t batch, rows_each;  // B, E
  int64_t num_rows;          // n, or R if ragged
  int64_t vocab, max_kept;
  Kind kind;
};

// The row of one output: the indices that the strides of the target multiply, and how it is read.
struct KeptRow {
  int64_t sequence, row;
  bool exists;
  int32_t status;  // of a row that does not exist
  SequenceParams params;
  Read read;
};

SPECDEC_HD inline KeptRow open_kept_row(const KeptTokensParams& p, int64_t n) {
  const int64_t b = n / p.rows_each, e = n % p.rows_each;
  const int64_t asked = p.rows.data == nullptr ? e : p.rows.at(b, e);
  const bool ragged = p.target_indptr.given();
  int64_t begin = 0, rows = p.num_rows;
  if (ragged) {
    // The offsets are data: whatever they hold, no row beyond the target is read.
    const int64_t first = p.target_indptr[b], end = p.target_indptr[b + 1];
    begin = first < 0 ? 0 : first > rows ? rows : first;
    rows = (end < rows ? end : rows) - begin;
  }
  KeptRow out = {ragged ? 0 : b, 0, false, 0, params_of(p.sampling, b), Read::kLogits};
  if (asked == -1) return out;
  if (!out.params.in_range()) {
    out.status = kBadParameter;
  } else if (asked < 0 || asked >= rows) {
    out.status = kTargetInvalid;
  } else {
    out.exists = true;
    out.row = begin + asked;
  }
  if (p.kind == Kind::kProbs) {
    out.read = out.params.temperature == 0 ? Read::kProbs : Read::kLogOfProbs;
  }
  return out;
}

// Why a row that is not valid holds no distribution.
SPECDEC_HD inline int32_t kept_fault(const KeptTokensParams& p, const KeptRow& at) {
  const bool any = allows_any(p.target.allowed.row(at.sequence, at.row), p.vocab);
  return any ? kTargetInvalid : kNothingAllowed;
}

// The smallest logit that is kept of a row with this maximum and threshold.
SPECDEC_HD inline float kept_threshold(float max, float temperature, float threshold) {
  constexpr double kLogOfNothing = -746;  // exp of it is 0 in a double
  const bool none = static_cast<double>(max) + kLogOfNothing * temperature < -FLT_MAX;
  const float floor = none ? -FLT_MAX : threshold_of_log_ratio(max, temperature, kLogOfNothing);
  return fmaxf(threshold, floor);
}

// A number that rises as the logit falls, and among equal ones with the id.
SPECDEC_HD inline uint64_t rank_key(uint32_t key, int32_t id) {
  return static_cast<uint64_t>(~key) << 32 | static_cast<uint32_t>(id);
}
SPECDEC_HD inline int32_t id_of_rank(uint64_t rank) { return static_cast<int32_t>(rank); }
SPECDEC_HD inline float logit_of_rank(uint64_t rank) {
  return from_ordered_key(~static_cast<uint32_t>(rank >> 32));
}

namespace cpu {
void kept_tokens(const KeptTokensParams& p, const Parallel& parallel);
}  // namespace cpu

// A cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a cudaStream_t.
namespace cuda {
int64_t workspace_bytes(const KeptTokensParams& p);  // device memory, which need not be cleared
int kept_tokens(const KeptTokensParams& p, void* workspace, void* stream);
}  // namespace cuda

}  // namespace specdec
