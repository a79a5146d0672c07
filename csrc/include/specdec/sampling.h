#pragma once
// Shared by all ops that read rows: dtypes, rows, sampling parameters, the status.
#include <cmath>
#include <cstdint>

#include "specdec/token_bitmask.h"

namespace specdec {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// One bit for each kind of data fault; specdec_kernels/arguments/status.py documents them.
enum Status : int32_t {
  kTargetInvalid = 1,
  kDraftInvalid = 2,
  kEmptyResidual = 4,
  kDraftOutOfRange = 8,
  kBadParameter = 16,
  kNothingAllowed = 32,
  kKeptCut = 64,
};

// Entries that are summed as one. It is fixed, so that neither the batch nor the number of threads
// changes a sum.
constexpr int64_t kTile = 4096;

struct Rows {
  const void* data;  // rows of V elements, contiguous in the last dimension
  DType dtype;
  int64_t stride_sequence;  // elements from one sequence to the next
  int64_t stride_row;       // elements from one row to the next
  TokenBitmask allowed;     // entries of other tokens count as -inf, or as probability 0
};

// How the entries of a row are read: as they are, as they are but known to be probabilities, or as
// logarithms of probabilities.
enum class Read : int32_t { kLogits, kProbs, kLogOfProbs };

// What the entry of a token that is not allowed is read as.
SPECDEC_HD constexpr float entry_not_allowed(Read read) {
  return read == Read::kProbs ? 0.0f : -INFINITY;
}

// For each parameter one value per sequence, or, where the vector is null, the scalar for all.
struct SamplingParams {
  const float* temperatures;  // [B], may be null
  const int32_t* top_ks;      // [B], may be null
  const float* top_ps;        // [B], may be null
  const float* min_ps;        // [B], may be null
  float temperature;
  int64_t top_k;
  float top_p;
  float min_p;
};

}  // namespace specdec
