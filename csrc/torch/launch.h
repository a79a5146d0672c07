#pragma once
// Launches an op on the device of its tensors: the CPU kernel or the CUDA kernel.
#include <torch/csrc/stable/accelerator.h>

#include "arguments/checks.h"
#include "arguments/launchers.h"
#include "specdec/cuda_error.h"
#include "torch/cuda_stream.h"
#include "torch/parallel.h"

namespace specdec {

// For ops that have kernels for the CPU alone. A meta tensor is that of a fake kernel.
inline void check_on_cpu(const char* name, const Tensor& t) {
  SPECDEC_CHECK(t.is_cpu() || device_name(t) == "meta", name, " must be on the CPU, got ",
                device_name(t));
}

inline void check_workspace_size(const Tensor& workspace, int64_t bytes) {
  SPECDEC_CHECK(workspace.size(0) >= bytes, "workspace must have at least ", bytes,
                " bytes for this call, got ", workspace.size(0));
}

// Calls start(stream), which returns a cudaError_t, with the current stream of the tensor's device.
template <class Start>
void start_on_cuda([[maybe_unused]] const Tensor& of, [[maybe_unused]] Start start) {
#ifdef SPECDEC_WITH_CUDA
  const int32_t device = of.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int status = start(current_cuda_stream(device));
  SPECDEC_CHECK(status == 0, "the CUDA kernel launch failed: ", cuda::describe_error(status));
#else
  SPECDEC_CHECK(false, "specdec_kernels was built without CUDA kernels");
#endif
}

// The scratch memory that the CUDA kernels of a call need; none in a build without them.
template <class OpParams>
int64_t workspace_bytes(const OpParams& p, const Launchers<OpParams>& launchers) {
  return launchers.workspace_bytes == nullptr ? 0 : launchers.workspace_bytes(p);
}

// CUDA kernels work in the caller's workspace, or in one of the call.
template <class OpParams>
void launch(const Tensor& of, const OpParams& p, const Launchers<OpParams>& launchers,
            const std::optional<Tensor>& workspace = std::nullopt) {
  if (of.is_cpu()) return launchers.cpu(p, torch_parallel());
  start_on_cuda(of, [&](void* stream) {
    const int64_t bytes = workspace_bytes(p, launchers);
    const Tensor memory =
        workspace ? *workspace : torch::stable::new_empty(of, {bytes}, ScalarType::Byte);
    check_workspace_size(memory, bytes);
    return launchers.cuda(p, memory.mutable_data_ptr(), stream);
  });
}

template <class OpParams>
void launch(const Tensor& of, const OpParams& p, const PlainLaunchers<OpParams>& launchers) {
  if (of.is_cpu()) return launchers.cpu(p, torch_parallel());
  start_on_cuda(of, [&](void* stream) { return launchers.cuda(p, stream); });
}

}  // namespace specdec
