#pragma once
// One sequence of a verifying op: its parameters, its rows, and where its noise comes from. The CPU
// and the CUDA kernels open it with the same code.
#include "specdec/philox.h"
#include "specdec/sequence_params.h"
#include "specdec/verification.h"

namespace specdec {

struct SequenceState {
  int64_t b;      // index in the batch
  int64_t begin;  // first row of a ragged sequence
  int64_t rows;   // 0 if there is nothing to verify
  uint64_t seed, position;
  SequenceParams params;
  float draft_temperature;  // temperature of the draft
  bool greedy;              // temperature 0: P is one-hot
  bool filtered;            // top-k, top-p or min-p removes tokens of P
  bool direct;  // target rows hold P itself: they are read at single tokens where possible
};

// Whether all uniforms that the caller gave for sequence b are in [0, 1), which NaN is not. Those
// that no decision would read are checked too, so that the answer does not depend on the rule.
template <class OpParams>
SPECDEC_HD inline bool uniforms_in_range(const OpParams& p, int64_t b) {
  if (p.uniforms == nullptr) return true;
  const int64_t columns = p.uniforms_per_sequence();
  bool good = true;
  SPECDEC_ROLLED
  for (int64_t i = b * columns; i < (b + 1) * columns; ++i) {
    good = good && p.uniforms[i] >= 0 && p.uniforms[i] < 1;
  }
  return good;
}

// Fills s and returns the status, which is not 0 if there is nothing to verify. `greedy` says that
// the rule is greedy; `most` is the number of target rows of each sequence if the target is not
// ragged, and the largest that counts if it is.
template <class OpParams>
SPECDEC_HD inline int32_t open_sequence(const OpParams& p, bool greedy, int64_t b, int64_t most,
                                        SequenceState& s) {
  const bool ragged = p.target_indptr.given();
  // Loaded first, because a GPU loads what follows at the same time.
  const int64_t begin = ragged ? p.target_indptr[b] : 0, end = ragged ? p.target_indptr[b + 1] : 0;
  s.b = b;
  s.begin = 0;
  s.rows = most;
  s.seed = static_cast<uint64_t>(p.seeds[b]);
  s.position = static_cast<uint64_t>(p.positions[b]);
  s.params = params_of(p.sampling, b);
  s.draft_temperature = s.params.temperature;
  if (p.reads_draft() && p.draft.form == DraftForm::kSampled) {
    s.draft_temperature = p.draft.temperatures ? p.draft.temperatures[b] : p.draft.temperature;
  }
  const bool valid = s.params.in_range() && s.draft_temperature >= 0 &&
                     s.draft_temperature <= FLT_MAX && uniforms_in_range(p, b);
  if (greedy) s.params = {0.0f, 0, 1.0f, 0.0f};
  s.greedy = s.params.temperature == 0;
  s.filtered = !s.greedy && s.params.filters(p.vocab);
  s.direct = p.kind == Kind::kProbs && p.reads_draft() && s.params.temperature == 1 &&
             !s.filtered && p.target.allowed.words == nullptr;
  if (ragged) {
    // The offsets are data: whatever they hold, no row beyond the target is read.
    const auto inside = [&](int64_t row, int64_t low) {
      return row < low ? low : row > p.num_rows ? p.num_rows : row;
    };
    s.begin = inside(begin, 0);
    const int64_t rows = inside(end, s.begin) - s.begin;
    s.rows = rows < most ? rows : most;
  }
  const int32_t status = !valid ? kBadParameter : s.rows == 0 ? kTargetInvalid : 0;
  if (status != 0) s.rows = 0;
  return status;
}

struct RowIndex {
  int64_t sequence, row;  // to be multiplied by the strides of the target
};

SPECDEC_HD inline RowIndex target_row_index(const VerifyParams& p, const SequenceState& s,
                                            int64_t i) {
  return p.target_indptr.given() ? RowIndex{0, s.begin + i} : RowIndex{s.b, i};
}

// How the target rows of a sequence are read.
SPECDEC_HD inline Read target_read(const VerifyParams& p, const SequenceState& s) {
  if (p.kind == Kind::kLogits) return Read::kLogits;
  return s.direct || s.greedy ? Read::kProbs : Read::kLogOfProbs;
}

// Why target row i, which is not valid, holds no distribution.
SPECDEC_HD SPECDEC_NOINLINE inline int32_t target_fault(const VerifyParams& p,
                                                        const SequenceState& s, int64_t i) {
  const RowIndex at = target_row_index(p, s, i);
  const bool any = allows_any(p.target.allowed.row(at.sequence, at.row), p.vocab);
  return any ? kTargetInvalid : kNothingAllowed;
}

// How many tokens the sequence may emit.
SPECDEC_HD inline int64_t most_new_tokens(const VerifyParams& p, const SequenceState& s) {
  if (p.max_new_tokens == nullptr) return s.rows;
  return p.max_new_tokens[s.b] < 0 ? 0 : p.max_new_tokens[s.b];
}

SPECDEC_HD inline bool is_eos(const VerifyParams& p, int64_t token) {
  bool found = false;
  SPECDEC_ROLLED
  for (int64_t e = 0; e < p.num_eos; ++e) found |= token == p.eos_token_ids[e];
  return found;
}

// Entry `given` of the caller's uniforms, or else the uniform of a noise stream at the position
// that lies `offset` after that of the first draft.
SPECDEC_HD inline double uniform_at(const VerifyParams& p, const SequenceState& s, int64_t given,
                                    int64_t offset, uint32_t stream, int64_t counter = 0) {
  if (p.uniforms != nullptr) return p.uniforms[given];
  return uniform(s.seed, s.position + static_cast<uint64_t>(offset), stream,
                 static_cast<uint32_t>(counter));
}

}  // namespace specdec
