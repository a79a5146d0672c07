#include "specdec/paged_truncate.h"

#include "torch/arguments/kv.h"
#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {
namespace {

void check_paged_truncate(const Tensor& block_tables, const Tensor& lengths,
                          const Tensor& new_lengths, int64_t block_size) {
  const int64_t batch = check_batch("lengths", lengths);
  check_integers("new_lengths", new_lengths, batch, lengths, "lengths");
  check_block_tables(block_tables, batch, lengths, "lengths");
  check_not_expanded("block_tables", block_tables);
  check_not_expanded("lengths", lengths);
  SPECDEC_CHECK(block_size >= 1, "block_size must be at least 1, got ", block_size);
}

std::tuple<Tensor, Tensor> paged_truncate_(Tensor block_tables, Tensor lengths, Tensor new_lengths,
                                           int64_t block_size) {
  check_paged_truncate(block_tables, lengths, new_lengths, block_size);
  new_lengths = read_first(new_lengths, lengths);
  const int64_t batch = lengths.size(0);
  const KvTable<void> tables = kv_table<void>(block_tables);
  Tensor blocks = torch::stable::new_empty(block_tables, {batch, tables.columns}),
         num_freed = torch::stable::new_empty(block_tables, {batch}, ScalarType::Int);
  const PagedTruncateParams p = {tables,
                                 batch,
                                 block_size,
                                 kv_vector<void>(lengths),
                                 kv_vector<const void>(new_lengths),
                                 ids_out(blocks),
                                 num_freed.mutable_data_ptr<int32_t>()};
  launch(lengths, p, SPECDEC_PLAIN_LAUNCHERS(PagedTruncateParams, paged_truncate));
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
