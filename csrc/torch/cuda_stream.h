#pragma once
#include <cstdint>

namespace specdec {

// The stream torch works on now, a cudaStream_t.
void* current_cuda_stream(int32_t device);

}  // namespace specdec
