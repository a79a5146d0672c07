#pragma once
// Functions that device code calls and does not inline: each takes about a hundred instructions,
// and a kernel with a copy at each use would be several times as large as an instruction cache.
#include <cmath>

#include "specdec/host_device.h"

namespace specdec {

SPECDEC_HD SPECDEC_NOINLINE inline double log_of(double x) { return log(x); }
SPECDEC_HD SPECDEC_NOINLINE inline double exp_of(double x) { return exp(x); }
SPECDEC_HD SPECDEC_NOINLINE inline double exp2_of(double x) { return exp2(x); }
SPECDEC_HD SPECDEC_NOINLINE inline float log_of(float x) { return logf(x); }

}  // namespace specdec
