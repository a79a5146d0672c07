#pragma once
// The forms in which a draft gives Q, the distribution that each token was drafted from.
#include "specdec/host_device.h"
#include "specdec/ids.h"
#include "specdec/sequence_params.h"

namespace specdec {

enum class Kind : int32_t { kLogits, kProbs };
enum class DraftForm : int32_t {
  kOneHot,   // no tensor: the draft was deterministic
  kRows,     // rows of logits or probabilities, as `kind` says
  kSampled,  // logits, with the logsumexp and threshold that `sample` returned
  kSparse,   // a few ids with their probabilities
};

SPECDEC_HD inline void put_id(void* ids, bool are_int64, int64_t at, int64_t id) {
  if (are_int64) {
    static_cast<int64_t*>(ids)[at] = id;
  } else {
    static_cast<int32_t*>(ids)[at] = static_cast<int32_t>(id);
  }
}

struct DraftParams {
  Rows rows;  // [B, M, D], or [M, D] if `flat`
  DraftForm form;
  Kind kind;
  bool flat;  // the sequences share one list of rows: that of a ragged chain, or the rows that
              // `draft_rows` chooses from; rows.stride_sequence is unused
  bool ids_are_int64;
  int64_t num_rows;         // M
  int64_t vocab;            // D: columns of a row, or ids of a sparse row
  const int32_t* columns;   // [V] column of each token, outside [0, D) if it has none; null if the
                            // column is the token
  const void* ids;          // [B, M, D] or [M, D] contiguous, null unless sparse
  const double* logsumexp;  // [B, M] or [M] contiguous, null unless sampled
  const float* threshold;   // as logsumexp
  const float* temperatures;  // [B], may be null
  float temperature;

  // The place of a sequence's row among all rows. A row that was chosen by data may be any number,
  // so that the sum may overflow; nothing is read there then.
  SPECDEC_HD int64_t place(int64_t b, int64_t row) const {
    return flat ? row
                : static_cast<int64_t>(static_cast<uint64_t>(b * num_rows) +
                                       static_cast<uint64_t>(row));
  }
  // Drafted ids below the limit are verified, those from it on are out of range. A draft with a
  // larger vocabulary may propose tokens that the target does not have: these are rejected as any
  // other token with P(x) = 0.
  SPECDEC_HD int64_t id_limit(int64_t target_vocab) const {
    const bool whole_rows = form == DraftForm::kRows || form == DraftForm::kSampled;
    return whole_rows && columns == nullptr && vocab > target_vocab ? vocab : target_vocab;
  }
};

// Row statistics from those that `sample` returned: exp(l / T - logsumexp) is computed relative to
// a logit near the maximum, where float32 subtracts exactly.
template <class RowStats>
SPECDEC_HD inline void set_sampled_stats(const DraftParams& p, int64_t statistic, float temperature,
                                         RowStats& stats) {
  const double logsumexp = p.logsumexp[statistic];
  stats.threshold = p.threshold[statistic];
  stats.inv_t = inverse_temperature(temperature);
  stats.valid = fabs(logsumexp) < INFINITY && stats.threshold == stats.threshold;
  stats.max = static_cast<float>(logsumexp / stats.inv_t);
  stats.log_sum = logsumexp - static_cast<double>(stats.max) * stats.inv_t;
}

}  // namespace specdec
