#include "specdec/paged_append.h"

#include "torch/arguments/kv.h"
#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {
namespace {

void check_entries_of(const std::vector<Tensor>& caches, const std::vector<Tensor>& entries,
                      const Tensor& positions) {
  SPECDEC_CHECK(caches.size() == entries.size(), "entries must have one tensor for each of the ",
                caches.size(), " caches, got ", entries.size());
  for (size_t i = 0; i < caches.size(); ++i) {
    const Tensor &cache = caches[i], &entry = entries[i];
    SPECDEC_CHECK(entry.dim() == 4 && entry.size(0) == positions.size(0) &&
                      entry.size(2) == cache.size(2) && entry.size(3) == cache.size(3),
                  "entries[", i, "] must be [B, n, H, D] = [", positions.size(0), ", n, ",
                  cache.size(2), ", ", cache.size(3), "], got ", shape_of(entry));
    SPECDEC_CHECK(entry.scalar_type() == cache.scalar_type(), "entries[", i, "] must be ",
                  dtype_name(cache.scalar_type()), " like its cache, got ",
                  dtype_name(entry.scalar_type()));
    SPECDEC_CHECK(entry.stride(3) == 1 || entry.size(3) <= 1, "entries[", i,
                  "] must have a contiguous last dimension, got stride ", entry.stride(3));
    SPECDEC_CHECK(entry.device() == positions.device(), "entries[", i,
                  "] must be on the device of positions, ", device_name(positions), ", got ",
                  device_name(entry));
  }
}

Extents check_paged_append(const std::vector<Tensor>& caches, const std::vector<Tensor>& entries,
                           const Tensor& block_tables, const Tensor& positions,
                           const std::optional<Tensor>& counts) {
  const int64_t batch = check_batch("positions", positions);
  check_block_tables(block_tables, batch, positions, "positions");
  if (counts) check_integers("counts", *counts, batch, positions, "positions");
  check_paged_caches(caches, positions, "positions");
  check_entries_of(caches, entries, positions);
  return check_written("caches", caches);
}

void paged_append_(std::vector<Tensor> caches, std::vector<Tensor> entries, Tensor block_tables,
                   Tensor positions, std::optional<Tensor> counts) {
  entries =
      read_first(entries, check_paged_append(caches, entries, block_tables, positions, counts));
  const std::vector<KvTensor> tensors = kv_tensors(caches, entries, 1);
  const PagedAppendParams p = {
      tensors.data(),
      static_cast<int64_t>(tensors.size()),
      positions.size(0),
      kv_vector<const void>(positions),
      counts ? kv_vector<const void>(*counts) : KvVector<const void>{nullptr, false, 0},
      {kv_table<const void>(block_tables), caches.empty() ? 0 : caches[0].size(0)}};
  launch(positions, p, SPECDEC_PLAIN_LAUNCHERS(PagedAppendParams, paged_append));
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "paged_append_(Tensor(a!)[] caches, Tensor[] entries, Tensor block_tables, "
      "Tensor positions, Tensor? counts) -> ()");
  m.def(
      "validate_paged_append_(Tensor[] caches, Tensor[] entries, Tensor block_tables, "
      "Tensor positions, Tensor? counts) -> ()");
}
SPECDEC_IMPLEMENT(paged_append_)
SPECDEC_VALIDATE(paged_append_, check_paged_append)

}  // namespace
}  // namespace specdec
