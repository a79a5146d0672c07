#pragma once
// Filters are thresholds on the raw logits. The CPU and the CUDA kernels share this one.
#include <cmath>

#include "specdec/host_device.h"
#include "specdec/math.h"

namespace specdec {

// Smallest float l with (l - max) / T >= log(min_p).
SPECDEC_HD inline float min_p_threshold(float max, float temperature, float min_p) {
  if (!(min_p > 0)) return -INFINITY;
  const double exact = static_cast<double>(max) + temperature * log_of(static_cast<double>(min_p));
  const float rounded = static_cast<float>(exact);
  return static_cast<double>(rounded) < exact ? nextafterf(rounded, INFINITY) : rounded;
}

}  // namespace specdec
