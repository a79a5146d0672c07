#pragma once
// Runs an op on the device of its tensors: the CPU kernel, or the CUDA kernel with the scratch
// memory that its plan asks for. The cache ops, which need none, have their own run_where in
// arguments/kv.h.
#include <torch/csrc/stable/accelerator.h>

#include "specdec/cuda_plan.h"
#include "torch/arguments/checks.h"
#include "torch/cuda_stream.h"
#include "torch/parallel.h"

namespace specdec {

// The schedule that the CUDA launchers are asked for; tests and benchmarks change it.
CudaRequest& cuda_request();

template <class OpParams>
struct Launchers {
  void (*cpu)(const OpParams&, const Parallel&);
  int (*plan)(const OpParams&, const CudaRequest&, CudaPlan*);
  int (*cuda)(const OpParams&, const CudaPlan&, void* workspace, void* stream);
};

template <class OpParams>
void run_where(const Tensor& of, const OpParams& p, const Launchers<OpParams>& launchers) {
  if (of.is_cpu()) return launchers.cpu(p, torch_parallel());
#ifdef SPECDEC_WITH_CUDA
  const int32_t device = of.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  CudaPlan plan = {};
  int status = launchers.plan(p, cuda_request(), &plan);
  if (status == 0) {
    Tensor workspace = torch::stable::new_empty(of, {plan.workspace_bytes}, ScalarType::Byte);
    status = launchers.cuda(p, plan, workspace.mutable_data_ptr(), current_cuda_stream(device));
  }
  SPECDEC_CHECK(status == 0, "the CUDA kernels did not start, cudaError_t ", status);
#else
  SPECDEC_CHECK(false, "specdec_kernels was built without CUDA kernels");
#endif
}

#ifdef SPECDEC_WITH_CUDA
#define SPECDEC_LAUNCHERS(op) {specdec::cpu::op, specdec::cuda::plan_##op, specdec::cuda::op}
#else
#define SPECDEC_LAUNCHERS(op) {specdec::cpu::op, nullptr, nullptr}
#endif

}  // namespace specdec
