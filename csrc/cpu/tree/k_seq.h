#pragma once
// Rule k_seq (Sun et al. 2023, SpecTr): K siblings drawn from one distribution Q are tried one
// after the other against the whole target P, each accepted with min(1, P / (rho Q)). rho is the
// smallest factor in [1, K] at which the emitted tokens still follow P. See docs/rules.md#k_seq.
#include "cpu/tree/residual.h"

namespace specdec::cpu {

class KSeq {
 public:
  KSeq(const RowView& row, const RowStats& stats, const Survivors* survivors,
       DraftDistribution& draft, const Parallel& parallel, ResidualScratch& scratch)
      : row_(row),
        stats_(stats),
        survivors_(survivors),
        draft_(draft),
        parallel_(parallel),
        scratch_(scratch) {}

  // Finds rho for so many siblings; false if the draft row is invalid.
  bool solve(int64_t siblings);
  double rho() const { return 1 / static_cast<double>(inverse_rho_); }
  // The recovered token after every sibling was rejected, -1 if the residual is empty.
  int64_t draw(double uniform);

 private:
  // beta(t) = sum of min(Q, tP) at t = 1 / rho, the probability that one trial accepts, and its
  // slope in t.
  struct Overlaps {
    float t;
    double beta = 0, slope = 0;
  };
  // False if the draft row is invalid.
  bool measure(Overlaps* at, int64_t count);
  // Moves the ends of an interval closer together: `low` is lossless and `high` is not.
  void narrow(Overlaps& low, Overlaps& high, int64_t siblings);
  // P and Q of one tile, or of the survivors; false if the draft row is invalid.
  bool load(int64_t t, float* p, float* q) const;
  void residual(const float* p, const float* q, int64_t n, float* out) const;

  const RowView& row_;
  const RowStats& stats_;
  const Survivors* survivors_;
  DraftDistribution& draft_;
  const Parallel& parallel_;
  ResidualScratch& scratch_;
  float inverse_rho_ = 1;
  float share_ = 1;  // the residual is P - share * min(Q, P / rho)
};

}  // namespace specdec::cpu
