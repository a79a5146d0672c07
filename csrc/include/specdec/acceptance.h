#pragma once
// Decides on one draft from a few numbers. The CPU and the CUDA verifiers share this arithmetic, so
// that they accept the same tokens to the bit; docs/rules.md explains the rules.
//
// P and Q are the distributions of the target and of the draft at the drafted token's position, x
// is the drafted token, u its acceptance uniform.
#include <cmath>
#include <cstdint>

#include "specdec/host_device.h"
#include "specdec/math.h"

namespace specdec {

struct Acceptance {
  bool accepted;
  double probability;  // may exceed 1; `recorded_accept_prob` clips it
};

// The value that `accept_probs` holds for an acceptance probability.
SPECDEC_HD inline float recorded_accept_prob(double probability) {
  return static_cast<float>(probability > 1 ? 1.0 : probability);
}

// The ratio test u * q_x < p_x, where q_x is Q(x) times the rule's factor for Q. The comparison is
// strict, so that no token with P(x) = 0 is accepted. It multiplies and does not divide,
// because the rounding of a quotient could decide where both sides are equal.
SPECDEC_HD inline Acceptance accept_ratio(double u, double p_x, double q_x) {
  return {u * q_x < p_x, p_x == 0 ? 0 : p_x / q_x};
}

// A probability whose logarithm is not above this is 0 in a double. Masks of large negative numbers
// in the place of -inf give such logarithms.
constexpr double kLogOfZero = -745.13321910194122;

// The same test on logarithms, for distributions that are given as logits: the ratio of two small
// probabilities has all its digits.
SPECDEC_HD inline Acceptance accept_log_ratio(double u, double log_p, double log_q) {
  if (!(log_p > kLogOfZero)) return {false, 0};
  const double log_ratio = log_p - log_q;
  return {log_of(u) < log_ratio, exp_of(fmin(0.0, log_ratio))};
}

// The ratio test of a drafted token. `direct` says that the target row holds the probabilities:
// then `p_x` is used, else `log_p`. `scale` is the rule's factor for Q.
template <class DraftDistribution>
SPECDEC_HD inline Acceptance accept_draft(bool direct, double u, double p_x, double log_p,
                                          double scale, const DraftDistribution& draft) {
  return direct ? accept_ratio(u, p_x, scale * draft.q_x)
                : accept_log_ratio(u, log_p, log_of(scale) + draft.log_q_x);
}

// P(x) / Q(x), and 0 wherever P(x) is 0.
SPECDEC_HD inline double probability_ratio(double p_x, double q_x) {
  return p_x > 0 ? p_x / q_x : 0;
}
SPECDEC_HD inline double probability_ratio_of_logs(double log_p, double log_q) {
  return log_p > kLogOfZero ? exp_of(log_p - log_q) : 0;
}

// P(x) / Q(x) of a drafted token; the arguments are those of `accept_draft` without u and scale.
template <class DraftDistribution>
SPECDEC_HD inline double ratio_of_draft(bool direct, double p_x, double log_p,
                                        const DraftDistribution& draft) {
  return direct ? probability_ratio(p_x, draft.q_x)
                : probability_ratio_of_logs(log_p, draft.log_q_x);
}

// Block verification (Sun et al. 2024): c_i, the factor of P after i drafts, from c = c_{i-1} and
// the ratio P(x) / Q(x). c_0 is 1.
SPECDEC_HD inline double next_p_scale(double c, double ratio) {
  return ratio > 0 && c > 0 ? fmin(1.0, c * ratio) : 0;
}

// Block verification: h_i, the probability of accepting i drafts given that no more are accepted.
// `positive` is the sum of max(c_i P - Q, 0) over the next row, `negative` that of
// max(Q - c_i P, 0).
SPECDEC_HD inline double block_accept_prob(double c, double positive, double negative) {
  return negative > 0 ? fmin(1.0, positive / negative) : c;
}

// Rule typical accepts x if P(x) > min(epsilon, delta * exp_of(-H(P))). The entropy H costs a pass
// over the row. It is not needed where P(x) > epsilon (accepted) or P(x) = 0 (rejected).
SPECDEC_HD inline bool typical_needs_entropy(double p_x, double epsilon) {
  return p_x > 0 && !(p_x > epsilon);
}
SPECDEC_HD inline double typical_bound(double epsilon, double delta, double entropy) {
  return fmin(epsilon, delta * exp_of(-entropy));
}

// Whether log P(top) - log P(x) <= tau and P(x) > 0, from what the row holds of x and of the
// likeliest token.
SPECDEC_HD inline bool within_top_distance(double value, double max, double inv_t, double tau,
                                           bool probabilities) {
  return probabilities ? value > 0 && log_of(max) - log_of(value) <= tau
                       : value > -INFINITY && (value == max || (max - value) * inv_t <= tau);
}

// Rule synthetic accepts with a probability that the caller gives; NaN accepts nothing.
SPECDEC_HD inline Acceptance accept_at_rate(double u, float rate) {
  return {u < rate, rate < 0 ? 0.0f : rate};
}

// Rule lenient at temperature 0: P(x) >= lenience * max P, where P is that of temperature 1.
// `value` and `max` are what the row holds.
SPECDEC_HD inline bool accept_near_maximum(double value, double max, double lenience,
                                           bool probabilities) {
  return probabilities ? value >= lenience * max : value - max >= log_of(lenience);
}

// Rule k_seq (Sun et al. 2023): 1 - (1 - beta)^K, the probability that at least one of K siblings
// is accepted if each is accepted with probability beta, independently of the others.
SPECDEC_HD inline double any_sibling_accepted(double beta, int64_t siblings) {
  // Rounding may leave a sum of probabilities a little above 1.
  return -expm1(static_cast<double>(siblings) * log1p(-fmin(beta, 1.0)));
}

// any_sibling_accepted(beta, K) / beta, in [1, K]. It falls as beta grows; its limit at 0 is K.
SPECDEC_HD inline double sibling_share(double beta, int64_t siblings) {
  if (siblings == 1) return 1;
  if (!(beta > 0)) return static_cast<double>(siblings);
  return any_sibling_accepted(beta, siblings) / beta;
}

}  // namespace specdec
