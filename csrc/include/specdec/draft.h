#pragma once
// What a draft's law is made of; what all ops that verify share.
#include "specdec/host_device.h"
#include "specdec/sampling.h"

namespace specdec {

enum class Kind : int32_t { kLogits, kProbs };
// Nothing (each drafted token was certain), rows of what `kind` says, logits with what sample left
// behind, or a few ids with their probabilities.
enum class DraftForm : int32_t { kOneHot, kRows, kSampled, kSparse };

SPECDEC_HD inline int64_t id_at(const void* ids, bool are_int64, int64_t at) {
  return are_int64 ? static_cast<const int64_t*>(ids)[at] : static_cast<const int32_t*>(ids)[at];
}

SPECDEC_HD inline void put_id(void* ids, bool are_int64, int64_t at, int64_t id) {
  if (are_int64) {
    static_cast<int64_t*>(ids)[at] = id;
  } else {
    static_cast<int32_t*>(ids)[at] = static_cast<int32_t>(id);
  }
}

struct DraftSource {
  Rows rows;  // [B, M, D], or flat [M, D]: then stride_sequence is unused
  DraftForm form;
  Kind kind;
  bool flat;
  bool ids_are_int64;
  int64_t num_rows;           // M
  int64_t vocab;              // D: columns of a row, or ids of a sparse one
  const int32_t* columns;     // [V] column of each token, outside [0, D): none; may be null: v
  const void* ids;            // like rows, contiguous, null unless sparse
  const double* logsumexp;    // [B, M] or [M] contiguous, null unless sampled
  const float* threshold;     // the same
  const float* temperatures;  // [B], may be null
  float temperature;

  // Drafted ids below it are judged where Q is asked: a draft with a larger vocabulary may propose
  // what the target cannot say, and that is a rejection like any other.
  SPECDEC_HD int64_t id_limit(int64_t target_vocab) const {
    const bool own = form == DraftForm::kRows || form == DraftForm::kSampled;
    return own && columns == nullptr && vocab > target_vocab ? vocab : target_vocab;
  }
};

}  // namespace specdec
