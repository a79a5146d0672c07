#pragma once
#include <cstdint>

namespace specdec {

// The current stream of torch on a device, a cudaStream_t.
void* current_cuda_stream(int32_t device);

}  // namespace specdec
