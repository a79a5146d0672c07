#pragma once
// Runs an op where its tensors are: the CPU kernel, or the CUDA kernels on the stream of the call.
#include "arguments/launchers.h"
#include "c/tensor.h"
#include "cpu/thread_count.h"

namespace specdec {

namespace c {

struct WithoutCuda {};
struct CudaError {
  int status;
};

inline void check_started(int status) {
  if (status != 0) throw CudaError{status};
}

}  // namespace c

template <class OpParams>
void launch(const Tensor& of, const OpParams& p, const PlainLaunchers<OpParams>& launchers) {
  if (!of.device().is_cuda) return launchers.cpu(p, cpu::counted());
  if (launchers.cuda == nullptr) throw c::WithoutCuda{};
  c::check_started(launchers.cuda(p, of.device().stream));
}

}  // namespace specdec
