#pragma once
// Probabilities from the statistics of a row. The CPU and the CUDA kernels keep these statistics in
// structs of their own, with the same names of fields.
#include <cmath>

#include "specdec/host_device.h"
#include "specdec/math.h"

namespace specdec {

// log P of the entry l of a row: the entry is a logit, or in a direct row the probability itself.
template <class RowStats>
SPECDEC_HD inline double entry_logprob(const RowStats& stats, float l) {
  if (stats.direct) return log_of(static_cast<double>(l));
  if (!(l >= stats.threshold)) return -INFINITY;
  return (static_cast<double>(l) - stats.max) * stats.inv_t - stats.log_sum;
}

// The logsumexp of l / T over the survivors.
template <class RowStats>
SPECDEC_HD inline double row_logsumexp(const RowStats& stats) {
  return static_cast<double>(stats.max) * stats.inv_t + stats.log_sum;
}

}  // namespace specdec
