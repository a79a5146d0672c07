#pragma once
// The next level of a drafted tree, from the logits of its frontier.
#include "specdec/parallel.h"
#include "specdec/sampling.h"

namespace specdec {

constexpr int64_t kMaxWidth = 64;

struct ExpandTreeParams {
  Rows logits;          // [B, F, V]
  const float* scores;  // [B, F]
  int64_t score_stride_sequence, score_stride;
  const float* temperatures;  // [B], may be null: then the scalar holds
  float temperature;
  int64_t* tokens;    // [B, F, width]
  float* out_scores;  // [B, F, width]
  int64_t* frontier;  // [B, width], into F * width
  int64_t batch;
  int64_t nodes;  // F
  int64_t vocab;
  int64_t width;
};

namespace cpu {
void expand_tree(const ExpandTreeParams& p, const Parallel& parallel);
}  // namespace cpu

}  // namespace specdec
