#pragma once
// A decoder layer without its attention, for few rows: what comes before the cache and what comes
// after it. Each intermediate result is rounded to the dtype where a model's own forward rounds it.
#include "specdec/linear.h"

namespace specdec {

// RMSNorm, the projections to queries, keys and values, and rotary position embeddings.
struct NormQkvRopeParams {
  const void* x;              // [rows, hidden], in parts that are normalised each on its own
  const void* norm;           // [hidden]
  PackedWeight qkv[3];        // hidden to [heads * head_size]
  const void* head_norms[2];  // [head_size] of queries and of keys, may be null
  const void *cos, *sin;      // [rows, head_size] or, for all sequences, [row_period, head_size]
  void* outputs[3];           // [rows, heads * head_size]
  DType dtype;                // of all
  int64_t rows, hidden, parts, head_size, row_period;
  float epsilon;
};

// The output projection, the residual, RMSNorm, and a gated feed-forward network with its residual.
struct OutputNormMlpParams {
  const void* attended;  // [rows, attended_size]
  const void* residual;  // [rows, hidden]
  const void* norm;      // [hidden]
  PackedWeight output;   // attended_size to hidden
  PackedWeight gate, up, down;
  void* y;      // [rows, hidden]
  DType dtype;  // of all
  int64_t rows, attended_size, hidden;
  float epsilon;
};

namespace cpu {
void norm_qkv_rope(const NormQkvRopeParams& p, const Parallel& threads);
void output_norm_mlp(const OutputNormMlpParams& p, const Parallel& threads);
}  // namespace cpu

}  // namespace specdec
