#pragma once
// Rule k_seq (Sun et al. 2023, SpecTr): K siblings drawn from one distribution Q are tried one
// after the other against the whole target P, each accepted with min(1, P / (rho Q)). This part
// finds rho, the smallest factor in [1, K] at which the emitted tokens still follow P.
// See docs/rules.md#k_seq.
#include "cuda/tree/verifier.cuh"

namespace specdec::cuda {

class KSeqVerifier : public TreeVerifier {
 protected:
  using TreeVerifier::TreeVerifier;

  __forceinline__ __device__ void begin_search() {
    push_draft(t_.child, 1);
    const auto k = static_cast<double>(t_.num_children);
    t_.low = 1;
    t_.high = k;
    t_.passes = 0;
    measure_overlaps(1, 1 + (k - 1) / 8, 1 + (k - 1) / 2, k);
  }

  // Narrows (low, high], which holds rho: `high` is always large enough. Returns whether it is
  // narrow enough, and else asks for the overlaps at four more factors: two around the root of the
  // secant, and one between these and each end.
  __forceinline__ __device__ bool narrow_search() {
    const auto k = static_cast<double>(t_.num_children);
    for (int i = 0; i < kFactorsAtOnce; ++i) {
      const double rho = t_.factors[i], beta = t_.overlaps[i];
      const double gap = rho * beta - any_sibling_accepted(beta, t_.num_children);
      if (gap >= -kRounding || rho >= k) {
        t_.high = rho;
        t_.high_gap = gap;
        t_.beta = beta;
        break;
      }
      t_.low = rho;
      t_.low_gap = gap;
    }
    const double width = t_.high - t_.low;
    if (t_.high == 1 || width <= 5e-7 || ++t_.passes == 40) return true;
    const double slope = t_.high_gap - t_.low_gap;
    const double root = t_.low + (slope > 0 ? width * -t_.low_gap / slope : width / 2);
    const double near = fmax(width * fmin(0.03125, width), 1e-7);
    const double a = fmax(root - near, t_.low), b = fmin(root + near, t_.high);
    measure_overlaps((t_.low + a) / 2, a, b, (b + t_.high) / 2);
    return false;
  }

  // Sums P - share * min(Q, P / rho), the residual after every child was rejected.
  __forceinline__ __device__ void scan_k_seq_residual() {
    const double share = sibling_share(t_.beta, t_.num_children);
    t_.records[t_.first_draft].scale = static_cast<float>(share);
    scan(ScanKind::kKSeqResidual, TreeState::kSubtracted);
  }

 private:
  // Where P is Q, or nearly one token, their overlap is 1 less what rounding takes, and the K-th
  // root of that would be missing from the acceptance. The text errs by less than this.
  static constexpr double kRounding = 0x1p-22;

  __forceinline__ __device__ void measure_overlaps(double a, double b, double c, double d) {
    t_.factors[0] = a;
    t_.factors[1] = b;
    t_.factors[2] = c;
    t_.factors[3] = d;
    scan(ScanKind::kOverlaps, TreeState::kOverlapsMeasured);
  }
};

}  // namespace specdec::cuda
