// The cache ops as csrc/torch registers them, but with the CUDA kernels behind the CPU dispatch
// key: tests/simt runs those on CPU tensors. For tests/simt/kv_emulator.py.
#define SPECDEC_LIBRARY specdec_kernels_simt_kv

#include "../../csrc/arguments/kv.cpp"

#include "../../csrc/arguments/caches.cpp"
#include "../../csrc/arguments/checks.cpp"
#include "../../csrc/arguments/memory.cpp"
#include "../../csrc/cuda/kv/append.cu"
#include "../../csrc/cuda/kv/compact.cu"
#include "../../csrc/cuda/kv/paged_append.cu"
#include "../../csrc/cuda/kv/paged_truncate.cu"
#include "../../csrc/cuda/kv/realign.cu"
#include "../../csrc/cuda/kv/ring_truncate.cu"
#include "../../csrc/cuda/kv/truncate.cu"
#include "../../csrc/torch/ops/kv_append.cpp"
#include "../../csrc/torch/ops/kv_compact.cpp"
#include "../../csrc/torch/ops/kv_realign.cpp"
#include "../../csrc/torch/ops/kv_truncate.cpp"
#include "../../csrc/torch/ops/paged_append.cpp"
#include "../../csrc/torch/ops/paged_truncate.cpp"
#include "../../csrc/torch/ops/ring_truncate.cpp"
#include "../../csrc/torch/tensor.cpp"

namespace specdec {

// No CUDA device: every tensor is on the CPU, and these take the place of the CPU kernels.
static void check_launch(int status) {
  SPECDEC_CHECK(status == 0,
                "the launch failed: ", cudaGetErrorString(static_cast<cudaError_t>(status)));
}

namespace cpu {

#define SPECDEC_IN_SHIM(op, OpParams) \
  void op(const OpParams& p, const Parallel&) { check_launch(cuda::op(p, nullptr)); }
SPECDEC_IN_SHIM(kv_append, KvAppendParams)
SPECDEC_IN_SHIM(kv_truncate, KvTruncateParams)
SPECDEC_IN_SHIM(kv_compact, KvCompactParams)
SPECDEC_IN_SHIM(paged_append, PagedAppendParams)
SPECDEC_IN_SHIM(paged_compact, PagedCompactParams)
SPECDEC_IN_SHIM(paged_truncate, PagedTruncateParams)
SPECDEC_IN_SHIM(kv_realign, KvRealignParams)
SPECDEC_IN_SHIM(ring_truncate, RingTruncateParams)

}  // namespace cpu

Parallel torch_parallel() { return serial(); }

}  // namespace specdec

#define SPECDEC_EXPORT extern "C" __attribute__((visibility("default")))

SPECDEC_EXPORT void simt_reverse(bool reverse) { simt::reverse = reverse; }

SPECDEC_EXPORT int64_t simt_launches() { return simt::launches; }

// Undefined behaviour on purpose, to show that the sanitizer reports it.
SPECDEC_EXPORT unsigned simt_misaligned_load(const char* bytes) {
  return reinterpret_cast<const uint4*>(bytes)->x;
}
