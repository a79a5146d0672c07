#pragma once
// Filters are thresholds on the raw logits. The CPU and the CUDA kernels share this one.
#include <cmath>

#include "specdec/host_device.h"
#include "specdec/math.h"

namespace specdec {

// Smallest float l with (l - max) / T >= log_ratio.
SPECDEC_HD inline float threshold_of_log_ratio(float max, float temperature, double log_ratio) {
  const double exact = static_cast<double>(max) + temperature * log_ratio;
  const float rounded = static_cast<float>(exact);
  return static_cast<double>(rounded) < exact ? nextafterf(rounded, INFINITY) : rounded;
}

// Smallest float l with (l - max) / T >= log(min_p).
SPECDEC_HD inline float min_p_threshold(float max, float temperature, float min_p) {
  if (!(min_p > 0)) return -INFINITY;
  return threshold_of_log_ratio(max, temperature, log_of(static_cast<double>(min_p)));
}

}  // namespace specdec
