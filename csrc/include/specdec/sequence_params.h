#pragma once
// The sampling parameters of one sequence.
#include <cfloat>
#include <cmath>

#include "specdec/host_device.h"
#include "specdec/sampling.h"

namespace specdec {

struct SequenceParams {
  float temperature;
  int64_t top_k;
  float top_p;
  float min_p;

  SPECDEC_HD bool in_range() const {
    return temperature >= 0 && temperature <= FLT_MAX && top_k >= 0 && top_p > 0 && top_p <= 1 &&
           min_p >= 0 && min_p <= 1;
  }
  SPECDEC_HD bool filters(int64_t vocab) const {
    return (top_k > 0 && top_k < vocab) || top_p < 1 || min_p > 0;
  }
};

SPECDEC_HD inline SequenceParams params_of(const SamplingParams& s, int64_t sequence) {
  return {s.temperatures ? s.temperatures[sequence] : s.temperature,
          s.top_ks ? s.top_ks[sequence] : s.top_k, s.top_ps ? s.top_ps[sequence] : s.top_p,
          s.min_ps ? s.min_ps[sequence] : s.min_p};
}

// Bounded by the largest float: a temperature under 1/FLT_MAX must not make 0 * inf at the maximum.
SPECDEC_HD inline float inverse_temperature(float temperature) {
  return fminf(1.0f / temperature, FLT_MAX);
}

}  // namespace specdec
