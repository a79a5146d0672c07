#pragma once
// Rule k_seq (Sun et al. 2023): K siblings drawn from one law, each tried against the whole target.
#include "cpu/tree/residual.h"

namespace specdec::cpu {

class KSeq {
 public:
  KSeq(const RowView& row, const RowStats& stats, const Survivors* listed, DraftDistribution& draft,
       const Parallel& parallel, LeftMemory& memory)
      : row_(row),
        law_(stats),
        listed_(listed),
        draft_(draft),
        parallel_(parallel),
        memory_(memory) {}

  // Finds rho for so many siblings; false if the draft row is no law.
  bool solve(int64_t siblings);
  double rho() const { return 1 / static_cast<double>(inverse_); }
  // What follows when none of them stood, -1 if nothing is left.
  int64_t draw(double uniform);

 private:
  // beta = sum of min(Q, tP) at t = 1 / rho, and its slope in t.
  struct Bound {
    float t;
    double beta = 0, slope = 0;
  };
  bool measure(Bound* at, int64_t count);
  void narrow(Bound& low, Bound& high, int64_t siblings);
  bool load(int64_t t, float* p, float* q) const;
  void left(const float* p, const float* q, int64_t n, float* out) const;

  const RowView& row_;
  const RowStats& law_;
  const Survivors* listed_;
  DraftDistribution& draft_;
  const Parallel& parallel_;
  LeftMemory& memory_;
  float inverse_ = 1;  // 1 / rho
  float taken_ = 1;    // how often min(Q, P / rho) was taken when all have failed
};

}  // namespace specdec::cpu
