#pragma once
// Drafts that are copied from a sequence's own text (prompt lookup).
//
// The ending of a text is its last n tokens, a match an earlier place with the same n tokens. A
// match is described by its size, n, and its end, the index of its last token.
#include "specdec/ids.h"
#include "specdec/parallel.h"

namespace specdec {

struct NgramProposeParams {
  Ids history;             // [B, L]
  const int64_t* lengths;  // [B]
  IdsOut tokens;           // [B, gamma], -1: no draft
  int32_t* counts;         // [B], drafted tokens
  int64_t batch;
  int64_t columns;  // L, below 2^31
  int64_t gamma;
  int64_t max_ngram, min_ngram;  // 1 <= min_ngram <= max_ngram
};

// The tokens of a sequence; none if its length is outside [0, L], which is a fault in the data.
SPECDEC_HD inline int64_t text_length(const NgramProposeParams& p, int64_t b) {
  const int64_t length = p.lengths[b];
  return length >= 0 && length <= p.columns ? length : 0;
}

// The size of the longest match that ends at `end`, which is below `length - 1`; 0 if none does.
SPECDEC_HD inline int64_t match_size(const NgramProposeParams& p, int64_t b, int64_t length,
                                     int64_t end) {
  const int64_t most = p.max_ngram <= end ? p.max_ngram : end + 1;
  int64_t size = 0;
  while (size < most && p.history.at(b, end - size) == p.history.at(b, length - 1 - size)) ++size;
  return size;
}

// The longer of two matches has the larger key; of equally long ones, the later. 0 is no match.
SPECDEC_HD inline uint64_t match_key(int64_t size, int64_t end) {
  return size == 0 ? 0 : static_cast<uint64_t>(size) << 32 | static_cast<uint64_t>(end);
}

// The chosen match of a sequence, and the draft that is copied from after it. A copy that reaches
// the end of the text goes on from its own beginning, so the text repeats with that period.
struct NgramCopy {
  int64_t start, period;  // period 0: no draft

  SPECDEC_HD NgramCopy(const NgramProposeParams& p, int64_t length, uint64_t key) {
    const bool found = static_cast<int64_t>(key >> 32) >= p.min_ngram;
    start = static_cast<int64_t>(key & 0xffffffffu) + 1;
    period = found ? length - start : 0;
  }
  SPECDEC_HD int64_t token(const NgramProposeParams& p, int64_t b, int64_t i) const {
    return period > 0 ? p.history.at(b, start + i % period) : -1;
  }
  SPECDEC_HD int32_t count(const NgramProposeParams& p) const {
    return period > 0 ? static_cast<int32_t>(p.gamma) : 0;
  }
};

namespace cpu {
void ngram_propose(const NgramProposeParams& p, const Parallel& parallel);
}  // namespace cpu

// Returns a cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a
// cudaStream_t.
namespace cuda {
int ngram_propose(const NgramProposeParams& p, void* stream);
}  // namespace cuda

}  // namespace specdec
