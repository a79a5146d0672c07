#include "torch/tree_layout.h"

#include "specdec/tree_layout.h"
#include "torch/checks.h"
#include "torch/parallel.h"

namespace specdec {
namespace {

bool is_id(const Tensor& t) {
  return t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long;
}

void check_ids(const char* name, const Tensor& t) {
  SPECDEC_CHECK(is_id(t), name, " must be int32 or int64, got ", dtype_name(t.scalar_type()));
}

// [B, N] or [B, K, L].
Ids ids_of(const Tensor& t) {
  const bool nested = t.dim() == 3;
  return {t.const_data_ptr(), t.scalar_type() == ScalarType::Long, t.stride(0),
          nested ? t.stride(1) : 0, t.stride(t.dim() - 1)};
}

}  // namespace

std::tuple<Tensor, Tensor> tree_attention(Tensor parents, Tensor lengths, int64_t slots,
                                          int64_t window) {
  SPECDEC_CHECK(parents.dim() == 2, "parents must be [B, N], got ", shape_of(parents));
  check_ids("parents", parents);
  const int64_t batch = parents.size(0), nodes = parents.size(1);
  check_vector("lengths", lengths, batch, ScalarType::Long, parents, "parents");
  SPECDEC_CHECK(slots >= 0, "slots must be at least 0, got ", slots);
  SPECDEC_CHECK(window >= 0, "window must be at least 0 (0 sees every key), got ", window);

  Tensor mask = torch::stable::new_empty(parents, {batch, nodes + 1, slots}, ScalarType::Bool);
  Tensor positions = torch::stable::new_empty(parents, {batch, nodes + 1}, ScalarType::Long);
  lengths = dense(lengths);
  const TreeAttentionParams p = {ids_of(parents),
                                 lengths.const_data_ptr<int64_t>(),
                                 mask.mutable_data_ptr<bool>(),
                                 positions.mutable_data_ptr<int64_t>(),
                                 batch,
                                 nodes,
                                 slots,
                                 window};
  tree_attention_cpu(p, torch_parallel());
  return {mask, positions};
}

}  // namespace specdec
