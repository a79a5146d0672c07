#pragma once
#include "specdec/cuda_plan.h"

namespace specdec {

// The schedule that the CUDA launchers are asked for; tests and benchmarks change it.
CudaRequest& cuda_request();

}  // namespace specdec
