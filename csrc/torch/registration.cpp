// Every schema of the library. Fake kernels stand under the public functions in Python; Triton
// registers its own implementations for CUDA devices there too.
#include <torch/csrc/stable/library.h>

#include "cpu/row/tile.h"
#include "torch/ops/expand_tree.h"
#include "torch/ops/kv.h"
#include "torch/ops/ops.h"
#include "torch/ops/schemas.h"
#include "torch/ops/tree_layout.h"
#include "torch/provider.h"

namespace specdec {
namespace {

bool built_with_cuda() {
#ifdef SPECDEC_WITH_CUDA
  return true;
#else
  return false;
#endif
}

std::string cpu_capability() { return cpu::tile_kernels().isa; }

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY(specdec_kernels, m) {
  m.def(specdec::kSampleSchema);
  m.def(specdec::kVerifyChainSchema);
  m.def(specdec::kVerifyTreeSchema);
  m.def(
      "tree_attention(Tensor parents, Tensor lengths, SymInt slots, int window) -> "
      "(Tensor mask, Tensor positions)");
  m.def(
      "rerank_tree(Tensor tokens, Tensor parents, Tensor scores, SymInt size) -> "
      "(Tensor tokens_out, Tensor parents_out, Tensor nodes)");
  m.def(
      "build_trie(Tensor sequences, SymInt size, bool merge) -> "
      "(Tensor tokens, Tensor parents, Tensor nodes, Tensor num_nodes)");
  m.def(
      "expand_tree(Tensor logits, Tensor scores, int width, Tensor? temperatures, "
      "float temperature) -> (Tensor tokens, Tensor scores_out, Tensor frontier)");
  m.def(specdec::kKvAppendSchema);
  m.def(specdec::kKvTruncateSchema);
  m.def(specdec::kKvCompactSchema);
  m.def(specdec::kPagedCompactSchema);
  m.def(specdec::kPagedTruncateSchema);
  m.def(specdec::kKvRealignSchema);
  m.def(specdec::kRingTruncateSchema);
  m.def("built_with_cuda() -> bool");
  m.def("cpu_capability() -> str");
  m.def("set_cuda_schedule(str schedule, int team) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  m.impl("sample", TORCH_BOX(&specdec::sample));
  m.impl("verify_chain", TORCH_BOX(&specdec::verify_chain));
  m.impl("verify_tree", TORCH_BOX(&specdec::verify_tree));
  m.impl("kv_append_", TORCH_BOX(&specdec::kv_append_));
  m.impl("kv_truncate_", TORCH_BOX(&specdec::kv_truncate_));
  m.impl("tree_attention", TORCH_BOX(&specdec::tree_attention));
  m.impl("rerank_tree", TORCH_BOX(&specdec::rerank_tree));
  m.impl("expand_tree", TORCH_BOX(&specdec::expand_tree));
  m.impl("build_trie", TORCH_BOX(&specdec::build_trie));
  m.impl("kv_compact_", TORCH_BOX(&specdec::kv_compact_));
  m.impl("paged_compact_", TORCH_BOX(&specdec::paged_compact_));
  m.impl("paged_truncate_", TORCH_BOX(&specdec::paged_truncate_));
  m.impl("kv_realign_", TORCH_BOX(&specdec::kv_realign_));
  m.impl("ring_truncate_", TORCH_BOX(&specdec::ring_truncate_));
}

#ifdef SPECDEC_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CUDA, m) {
  m.impl("sample", TORCH_BOX(&specdec::sample));
  m.impl("verify_chain", TORCH_BOX(&specdec::verify_chain));
  m.impl("verify_tree", TORCH_BOX(&specdec::verify_tree));
  m.impl("kv_append_", TORCH_BOX(&specdec::kv_append_));
  m.impl("kv_truncate_", TORCH_BOX(&specdec::kv_truncate_));
  m.impl("kv_compact_", TORCH_BOX(&specdec::kv_compact_));
  m.impl("paged_compact_", TORCH_BOX(&specdec::paged_compact_));
  m.impl("paged_truncate_", TORCH_BOX(&specdec::paged_truncate_));
  m.impl("kv_realign_", TORCH_BOX(&specdec::kv_realign_));
  m.impl("ring_truncate_", TORCH_BOX(&specdec::ring_truncate_));
}
#endif

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CompositeExplicitAutograd, m) {
  m.impl("built_with_cuda", TORCH_BOX(&specdec::built_with_cuda));
  m.impl("cpu_capability", TORCH_BOX(&specdec::cpu_capability));
  m.impl("set_cuda_schedule", TORCH_BOX(&specdec::set_cuda_schedule));
}
