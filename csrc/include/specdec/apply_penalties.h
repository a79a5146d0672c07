#pragma once
// Biases, bans and penalties of tokens, in place on rows of logits. Each row counts what the text
// holds and the drafts on the path to the row: a *named* token is one that these, a bias or a ban
// name; of all others the counts of the text alone tell.
#include <cmath>

#include "specdec/element.h"
#include "specdec/ids.h"
#include "specdec/parallel.h"
#include "specdec/token_bitmask.h"

namespace specdec {

struct PenaltyParams {
  void* rows;                // [B, N+1, V], or ragged [R, V], in float32, bfloat16, float16
  Integers target_indptr;    // [B+1] first row of each sequence in ragged rows, else none
  Ids drafted;               // [B, N]
  Ids parents;               // [B, N], without data for a chain
  const int32_t* counts;     // [B, V] of each token in the output, may be null
  TokenBitmask prompt;       // [B, ..] the tokens of the prompt, may be null
  const float* repetitions;  // [B], may be null, as the following
  const float* presences;
  const float* frequencies;
  Integers bias_ids;              // [B, K], ids outside [0, V) are unused
  const float* biases;            // [B, K]
  const int64_t* min_new_tokens;  // [B], may be null
  const int64_t* eos_token_ids;   // [num_eos]
  int64_t batch, drafts, vocab;   // B, N, V
  int64_t num_rows;               // R, if ragged
  int64_t num_biases, num_eos;
  int64_t stride_sequence, stride_row, stride_counts;
  float repetition, presence, frequency;
  DType dtype;

  SPECDEC_HD int64_t named() const { return drafts + num_biases + num_eos; }
};

// One sequence, and its penalties.
struct PenalisedSequence {
  int64_t b, begin, rows;
  int64_t min_new_tokens;
  float repetition, presence, frequency;

  SPECDEC_HD bool in_range() const {
    return repetition > 0 && repetition < INFINITY && fabsf(presence) < INFINITY &&
           fabsf(frequency) < INFINITY;
  }
};

SPECDEC_HD inline PenalisedSequence open_penalties(const PenaltyParams& p, int64_t b) {
  PenalisedSequence s = {b,
                         0,
                         p.drafts + 1,
                         p.min_new_tokens ? p.min_new_tokens[b] : 0,
                         p.repetitions ? p.repetitions[b] : p.repetition,
                         p.presences ? p.presences[b] : p.presence,
                         p.frequencies ? p.frequencies[b] : p.frequency};
  if (!p.target_indptr.given()) return s;
  // The offsets are data: whatever they hold, no row beyond the last is touched.
  const auto inside = [&](int64_t row, int64_t low) {
    return row < low ? low : row > p.num_rows ? p.num_rows : row;
  };
  s.begin = inside(p.target_indptr[b], 0);
  const int64_t rows = inside(p.target_indptr[b + 1], s.begin) - s.begin;
  s.rows = rows < s.rows ? rows : s.rows;
  return s;
}

SPECDEC_HD inline void* penalised_row(const PenaltyParams& p, const PenalisedSequence& s,
                                      int64_t i) {
  const int64_t sequence = p.target_indptr.given() ? 0 : s.b, row = s.begin + i;
  const int64_t at = sequence * p.stride_sequence + row * p.stride_row;
  return static_cast<char*>(p.rows) + at * (p.dtype == DType::kFloat32 ? 4 : 2);
}

// The draft before the last one on the path to a row, -1 at its begin. Row i follows draft i - 1.
SPECDEC_HD inline int64_t draft_before(const PenaltyParams& p, int64_t b, int64_t n) {
  if (p.parents.data == nullptr) return n - 1;
  const int64_t parent = p.parents.at(b, n);
  return parent < n ? parent : -1;
}

// How often a token occurs on the path to row i, and how long that is.
struct Path {
  int64_t length, occurrences;
};
SPECDEC_HD inline Path path_to(const PenaltyParams& p, int64_t b, int64_t i, int64_t token) {
  Path path = {0, 0};
  SPECDEC_ROLLED
  for (int64_t n = i - 1; n >= 0; n = draft_before(p, b, n)) {
    ++path.length;
    path.occurrences += p.drafted.at(b, n) == token;
  }
  return path;
}

// Named token k, -1 if there is none.
SPECDEC_HD inline int64_t named_token(const PenaltyParams& p, int64_t b, int64_t k) {
  int64_t token = -1;
  if (k < p.drafts) {
    token = p.drafted.at(b, k);
  } else if (k < p.drafts + p.num_biases) {
    token = p.bias_ids[b * p.num_biases + k - p.drafts];
  } else if (p.min_new_tokens != nullptr) {
    token = p.eos_token_ids[k - p.drafts - p.num_biases];
  }
  return token >= 0 && token < p.vocab ? token : -1;
}

// Whether a token is among the first `limit` named ones.
SPECDEC_HD inline bool is_named(const PenaltyParams& p, int64_t b, int64_t token, int64_t limit) {
  bool found = false;
  SPECDEC_ROLLED
  for (int64_t k = 0; k < limit && !found; ++k) found = named_token(p, b, k) == token;
  return found;
}

SPECDEC_HD inline int64_t count_of(const PenaltyParams& p, int64_t b, int64_t token) {
  const int32_t count = p.counts == nullptr ? 0 : p.counts[b * p.stride_counts + token];
  return count > 0 ? count : 0;
}
SPECDEC_HD inline bool in_prompt(const PenaltyParams& p, int64_t b, int64_t token) {
  return p.prompt.words != nullptr && is_allowed(p.prompt.row(b, 0), token);
}

// The logit of a token that occurs `count` times before it. The order is that of Transformers and
// vLLM: repetition, then frequency, then presence.
SPECDEC_HD inline float penalised(const PenalisedSequence& s, float logit, int64_t count,
                                  bool prompt) {
  if (count > 0 || prompt) logit = logit > 0 ? logit / s.repetition : logit * s.repetition;
  if (count == 0) return logit;
  const float taken = s.frequency * static_cast<float>(count);
  return logit - taken - s.presence;
}

// Row i of a named token: biases, then the ban of an end before the least length, then penalties.
SPECDEC_HD inline float penalise_named(const PenaltyParams& p, const PenalisedSequence& s,
                                       int64_t i, int64_t token, float logit) {
  SPECDEC_ROLLED
  for (int64_t k = 0; k < p.num_biases; ++k) {
    const int64_t at = s.b * p.num_biases + k;
    if (p.bias_ids[at] == token) logit += p.biases[at];
  }
  const Path path = path_to(p, s.b, i, token);
  SPECDEC_ROLLED
  for (int64_t e = 0; e < p.num_eos; ++e) {
    const bool bans = path.length < s.min_new_tokens && p.eos_token_ids[e] == token;
    if (bans) logit = -INFINITY;
  }
  return penalised(s, logit, count_of(p, s.b, token) + path.occurrences, in_prompt(p, s.b, token));
}

// Applies what a sequence has to one of its named tokens, in all its rows.
SPECDEC_HD inline void apply_to_named(const PenaltyParams& p, const PenalisedSequence& s,
                                      int64_t k) {
  const int64_t token = named_token(p, s.b, k);
  if (token < 0 || is_named(p, s.b, token, k)) return;
  SPECDEC_ROLLED
  for (int64_t i = 0; i < s.rows; ++i) {
    void* const row = penalised_row(p, s, i);
    const float logit = element(row, p.dtype, token);
    set_element(row, p.dtype, token, penalise_named(p, s, i, token, logit));
  }
}

// The same for a token of the text that is not named. The rows of a sequence with a penalty out of
// range become NaN, which the verifiers report.
SPECDEC_HD inline void apply_to_token(const PenaltyParams& p, const PenalisedSequence& s,
                                      int64_t token) {
  const bool good = s.in_range();
  const int64_t count = count_of(p, s.b, token);
  const bool prompt = in_prompt(p, s.b, token);
  if (good && ((count == 0 && !prompt) || is_named(p, s.b, token, p.named()))) return;
  SPECDEC_ROLLED
  for (int64_t i = 0; i < s.rows; ++i) {
    void* const row = penalised_row(p, s, i);
    const float logit = element(row, p.dtype, token);
    set_element(row, p.dtype, token, good ? penalised(s, logit, count, prompt) : NAN);
  }
}

namespace cpu {
void apply_penalties(const PenaltyParams& p, const Parallel& parallel);
}  // namespace cpu

// A cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a cudaStream_t.
namespace cuda {
int apply_penalties(const PenaltyParams& p, void* stream);
}  // namespace cuda

}  // namespace specdec
