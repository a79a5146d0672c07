#pragma once
// The next level of a draft tree (EAGLE-2): every node of the frontier, the last level drafted,
// gets its `width` likeliest tokens as children, and the best of all children are the next
// frontier.
#include "specdec/parallel.h"
#include "specdec/sampling.h"

namespace specdec {

constexpr int64_t kMaxWidth = 64;

struct ExpandTreeParams {
  Rows logits;          // [B, F, V]
  const float* scores;  // [B, F], log-probability of each path
  int64_t score_stride_sequence, score_stride;
  const float* temperatures;  // [B], may be null: then `temperature` is used
  float temperature;
  int64_t* tokens;    // [B, F, width], -1: no child
  float* out_scores;  // [B, F, width]
  int64_t* frontier;  // [B, width], indices into the F * width children
  int64_t batch;
  int64_t nodes;  // F
  int64_t vocab;
  int64_t width;
};

namespace cpu {
void expand_tree(const ExpandTreeParams& p, const Parallel& parallel);
}  // namespace cpu

}  // namespace specdec
