#include <cuda_runtime.h>

#include "specdec/cuda_error.h"

namespace specdec::cuda {
namespace {

std::string version_of(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

}  // namespace

std::string describe_error(int status) {
  const auto error = static_cast<cudaError_t>(status);
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  std::string text =
      std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + "); ";
  text +=
      driver == 0 ? "there is no CUDA driver" : "the driver supports CUDA " + version_of(driver);
  text += ", the kernels were built with CUDA " + version_of(runtime);
  if (error == cudaErrorInsufficientDriver) {
    text += ": update the driver, build with an older CUDA, or set SPECDEC_CUDA_PROVIDER=triton";
  }
  return text;
}

}  // namespace specdec::cuda
