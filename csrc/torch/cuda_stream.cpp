#include "torch/cuda_stream.h"

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

namespace specdec {

// The function is in libtorch_cuda.so. It is looked up at run time, so that this library also loads
// under a torch without CUDA.
void* current_cuda_stream(int32_t device) {
  using Function = AOTITorchError (*)(int32_t device, void** stream);
  static const Function get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library == nullptr
               ? nullptr
               : reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  STD_TORCH_CHECK(get != nullptr, "this build of torch has no CUDA support");
  void* stream = nullptr;
  STD_TORCH_CHECK(get(device, &stream) == 0, "torch has no current stream on CUDA device ", device);
  return stream;
}

}  // namespace specdec
