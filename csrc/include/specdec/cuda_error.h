#pragma once
// The words for a failed CUDA call.
#include <string>

namespace specdec::cuda {

// Names the error, a cudaError_t, and the CUDA versions of the driver and of the kernels.
std::string describe_error(int status);

}  // namespace specdec::cuda
