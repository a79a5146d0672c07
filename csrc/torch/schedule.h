#pragma once
#include "specdec/cuda_plan.h"

namespace specdec {

// The schedule that the CUDA launchers are asked for; tests and benchmarks change it.
CudaRequest& cuda_request();

// The plan of this thread's last launch that had one; it has no groups before the first.
CudaPlan& last_cuda_plan();

}  // namespace specdec
