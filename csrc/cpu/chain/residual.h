#pragma once
// The one-sided differences of c * P and l * Q over one row: acceptance of rule block, residuals.
#include <vector>

#include "cpu/row/draft.h"

namespace specdec::cpu {

struct Difference {
  bool valid = true;        // false: the draft row is no law
  double more = 0;          // sum of max(cP - lQ, 0)
  double less = 0;          // sum of max(lQ - cP, 0), only if asked for
  std::vector<float> sums;  // [tiles] parts of `more`
  std::vector<float> rest;  // [tiles] parts of `less`
};

// P and Q of one row and their factors.
struct Pair {
  const RowView& row;
  const RowStats& stats;  // of the target
  const DraftDistribution& draft;
  double c;
  float lenience;

  // One tile of max(cP - lQ, 0). False if the draft row is no law. `less` may be null.
  bool residual(int64_t t, float* out, float* less) const;
};

// Reads both rows once; reuses the memory of `d`.
void scan(const Pair& pair, bool both, const Parallel& parallel, Difference& d);

// Y ~ norm(max(cP - lQ, 0)) where these are all that P has and the whole draft row is known to be
// valid; -1 if nothing is left.
int64_t draw_among(const Pair& pair, const Survivors& survivors, double uniform);

// Whether `look_up` is cheaper than a scan: it compares every id with every other.
inline bool worth_looking_up(const DraftDistribution& draft) {
  constexpr int64_t kMost = 128;
  return draft.few() && draft.row.vocab() <= kMost;
}

// The same of a draft that is few tokens, by looking these up; the target's row sums to 1.
void look_up(const Pair& pair, Difference& d);

}  // namespace specdec::cpu
