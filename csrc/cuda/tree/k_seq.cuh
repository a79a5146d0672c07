#pragma once
// Rule k_seq (Sun et al. 2023, SpecTr): K siblings drawn from one distribution Q are tried one
// after the other against the whole target P, each accepted with min(1, P / (rho Q)). This part
// finds rho, the smallest factor in [1, K] at which the emitted tokens still follow P.
// See docs/rules.md#k_seq.
#include "cuda/tree/verifier.cuh"

namespace specdec::cuda {

inline __device__ void set_factors(TreeStep& t, double a, double b, double c, double d) {
  t.factors[0] = a;
  t.factors[1] = b;
  t.factors[2] = c;
  t.factors[3] = d;
}

// Where P is Q, or nearly one token, their overlap is 1 less what rounding takes, and the K-th
// root of that would be missing from the acceptance. The text errs by less than this.
constexpr double kRounding = 0x1p-22;

// Narrows (low, rho], whose upper end is always large enough. Returns whether it is narrow
// enough, and else asks for the overlaps at four more factors: two around the root of the secant,
// and one between these and each end. For the first thread, which alone knows the interval.
inline SPECDEC_NOINLINE __device__ bool narrow(TreeStep& t, int passes) {
  const auto k = static_cast<double>(t.children);
#pragma unroll 1
  for (int i = 0; i < kFactorsAtOnce; ++i) {
    const double rho = t.factors[i], beta = t.overlaps[i];
    const double gap = rho * beta - any_sibling_accepted(beta, t.children);
    if (gap >= -kRounding || rho >= k) {
      t.rho = rho;
      t.rho_gap = gap;
      t.beta = beta;
      break;
    }
    t.low = rho;
    t.low_gap = gap;
  }
  const double width = t.rho - t.low;
  if (t.rho == 1 || width <= 5e-7 || passes == 40) return true;
  const double slope = t.rho_gap - t.low_gap;
  const double root = t.low + (slope > 0 ? width * -t.low_gap / slope : width / 2);
  const double near = fmax(width * fmin(0.03125, width), 1e-7);
  const double a = fmax(root - near, t.low), b = fmin(root + near, t.rho);
  set_factors(t, (t.low + a) / 2, a, b, (b + t.rho) / 2);
  return false;
}

class KSeq : protected TreeVerifier {
 public:
  using TreeVerifier::TreeVerifier;

 protected:
  // Whether the child is accepted: u * s * Q(x) < P(x), strictly.
  __device__ bool test(int64_t trial, double s) {
    return by_one([&] {
      const bool inside = t_.x < p_.vocab;
      const float p_x = q_.direct && inside ? at(t_.row, t_.x) : 0.0f;
      const double log_p = q_.direct ? -INFINITY : target_logprob(t_.x);
      const double u = accept_uniform(p_, q_, t_.child, t_.depth, trial);
      const Acceptance a = accept_draft(q_.direct, u, p_x, log_p, s, t_.draft);
      record_accept_prob(t_.child, a.probability);
      return a.accepted;
    });
  }

  // Finds rho for so many children, whose draft is that of the child; false if its row is not
  // valid.
  __device__ bool find_factor() {
    const auto k = static_cast<double>(t_.children);
    one([&] {
      push_draft(1);
      t_.low = 1;
      t_.rho = k;
      set_factors(t_, 1, 1 + (k - 1) / 8, 1 + (k - 1) / 2, k);
    });
    for (int passes = 1;; ++passes) {
      sum_residual(ScanKind::kOverlaps);
      if (!t_.drafts_valid) return false;
      if (by_one([&] { return narrow(t_, passes); })) return true;
    }
  }

  // Sums P - share * min(Q, P / rho), the residual after every child was rejected.
  __device__ void sum_k_seq_residual() {
    one([&] {
      records()[t_.first_draft].scale = static_cast<float>(sibling_share(t_.beta, t_.children));
    });
    sum_residual(ScanKind::kKSeqResidual);
  }
};

}  // namespace specdec::cuda
