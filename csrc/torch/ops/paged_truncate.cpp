#include "arguments/caches.h"
#include "torch/register.h"

namespace specdec {
namespace {

std::tuple<Tensor, Tensor> paged_truncate_(Tensor block_tables, Tensor lengths, Tensor new_lengths,
                                           int64_t block_size) {
  check_paged_truncate(block_tables, lengths, new_lengths, block_size);
  const int64_t batch = lengths.size(0);
  Tensor blocks = torch::stable::new_empty(block_tables, {batch, block_tables.size(1)}),
         num_freed = torch::stable::new_empty(block_tables, {batch}, ScalarType::Int);
  truncate_tables_(block_tables, lengths, new_lengths, block_size,
                   {blocks.mutable_data_ptr(), num_freed.mutable_data_ptr<int32_t>()});
  return {blocks, num_freed};
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "paged_truncate_(Tensor(a!) block_tables, Tensor(b!) lengths, Tensor new_lengths, "
      "int block_size) -> (Tensor blocks, Tensor num_freed)");
  m.def(
      "validate_paged_truncate_(Tensor block_tables, Tensor lengths, Tensor new_lengths, "
      "int block_size) -> ()");
}
SPECDEC_IMPLEMENT(paged_truncate_)
SPECDEC_VALIDATE(paged_truncate_, check_paged_truncate)

}  // namespace
}  // namespace specdec
