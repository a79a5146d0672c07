#pragma once
// The residual max(cP - lQ, 0) of one row, not normalised; l is the lenience. Rule block also needs
// its counterpart max(lQ - cP, 0).
#include <vector>

#include "cpu/row/draft.h"

namespace specdec::cpu {

// P and Q of one row, and their factors: c is that of rule block, else 1.
struct RowPair {
  const RowView& row;
  const RowStats& stats;  // of the target
  const DraftDistribution& draft;
  double c;
  float lenience;

  // One tile of the residual and of its counterpart, which may be null. Returns false if the draft
  // row is not valid.
  bool residual_tile(int64_t t, float* positive, float* negative) const;
};

struct ResidualSums {
  bool valid = true;                  // the draft row is
  double positive = 0;                // sum of max(cP - lQ, 0)
  double negative = 0;                // sum of max(lQ - cP, 0), where asked for
  std::vector<float> positive_tiles;  // [tiles]
  std::vector<float> negative_tiles;  // [tiles]
};

// Reads each row once. Computes `sums.negative` only if `both`. Reuses the memory of `sums`.
void sum_residual(const RowPair& pair, bool both, const Parallel& parallel, ResidualSums& sums);

// Draws from the residual of a row whose survivors are listed, given that the whole draft row is
// valid. Returns -1 if the residual is empty.
int64_t draw_among_survivors(const RowPair& pair, const Survivors& survivors, double uniform);

// Whether `sum_residual_of_few` is cheaper than `sum_residual`: it compares every id with every
// other one.
inline bool worth_looking_up(const DraftDistribution& draft) {
  constexpr int64_t kMostIds = 128;
  return draft.lists_tokens() && draft.row.vocab() <= kMostIds;
}

// The sums of a draft that lists few tokens. P is read at these alone: elsewhere Q is 0, and the
// target's row sums to 1.
void sum_residual_of_few(const RowPair& pair, ResidualSums& sums);

}  // namespace specdec::cpu
