// The cache ops as csrc/torch binds them, served by the CUDA source on CPU tensors, under a name of
// their own; for tests/simt_kv.py.
#include "../../csrc/torch/arguments/kv.cpp"

#include "../../csrc/cuda/kv/append.cu"
#include "../../csrc/cuda/kv/compact.cu"
#include "../../csrc/cuda/kv/paged_truncate.cu"
#include "../../csrc/cuda/kv/realign.cu"
#include "../../csrc/cuda/kv/ring_truncate.cu"
#include "../../csrc/torch/arguments/checks.cpp"
#include "../../csrc/torch/ops/kv_append.cpp"
#include "../../csrc/torch/ops/kv_compact.cpp"
#include "../../csrc/torch/ops/kv_realign.cpp"
#include "../../csrc/torch/ops/paged_truncate.cpp"
#include "../../csrc/torch/ops/ring_truncate.cpp"
#include "torch/ops/schemas.h"

namespace specdec {

// No CUDA device: every tensor is on the CPU, and these stand where the CPU kernels would.
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

// Undefined on purpose: shows that the sanitizer is awake.
SPECDEC_EXPORT unsigned simt_misaligned_load(const char* bytes) {
  return reinterpret_cast<const uint4*>(bytes)->x;
}

STABLE_TORCH_LIBRARY(specdec_kernels_simt_kv, m) {
  m.def(specdec::kKvAppendSchema);
  m.def(specdec::kKvTruncateSchema);
  m.def(specdec::kKvCompactSchema);
  m.def(specdec::kPagedCompactSchema);
  m.def(specdec::kPagedTruncateSchema);
  m.def(specdec::kKvRealignSchema);
  m.def(specdec::kRingTruncateSchema);
}

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels_simt_kv, CPU, m) {
  m.impl("kv_append_", TORCH_BOX(&specdec::kv_append_));
  m.impl("kv_truncate_", TORCH_BOX(&specdec::kv_truncate_));
  m.impl("kv_compact_", TORCH_BOX(&specdec::kv_compact_));
  m.impl("paged_compact_", TORCH_BOX(&specdec::paged_compact_));
  m.impl("paged_truncate_", TORCH_BOX(&specdec::paged_truncate_));
  m.impl("kv_realign_", TORCH_BOX(&specdec::kv_realign_));
  m.impl("ring_truncate_", TORCH_BOX(&specdec::ring_truncate_));
}
