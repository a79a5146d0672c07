#include "arguments/caches.h"

#include "arguments/launch.h"
#include "specdec/kv_compact.h"
#include "specdec/paged_append.h"
#include "specdec/paged_truncate.h"

namespace specdec {
namespace {

void check_path(const Tensor& path, int64_t batch, const Tensor& base) {
  SPECDEC_CHECK(path.dim() == 2 && path.size(0) == batch, "path must be [B, P] with B = ", batch,
                ", got ", shape_of(path));
  check_ids("path", path);
  check_same_device("path", path, base, "base");
}

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
    SPECDEC_CHECK(on_one_device(entry, positions), "entries[", i,
                  "] must be on the device of positions, ", device_name(positions), ", got ",
                  device_name(entry));
  }
}

}  // namespace

Extents check_append(const std::vector<Tensor>& caches, const std::vector<Tensor>& entries,
                     const Tensor& positions) {
  const int64_t batch = check_batch("positions", positions);
  SPECDEC_CHECK(caches.size() == entries.size(), "entries must have one tensor for each of the ",
                caches.size(), " caches, got ", entries.size());
  check_caches("caches", caches, positions, "positions or lengths");
  check_caches("entries", entries, positions, "positions or lengths");
  for (size_t i = 0; i < caches.size(); ++i) {
    const Tensor &cache = caches[i], &entry = entries[i];
    SPECDEC_CHECK(entry.size(1) == cache.size(1) && entry.size(3) == cache.size(3), "entries[", i,
                  "] must be [B, H, n, D] = [", batch, ", ", cache.size(1), ", n, ", cache.size(3),
                  "], got ", shape_of(entry));
    SPECDEC_CHECK(entry.scalar_type() == cache.scalar_type(), "entries[", i, "] must be ",
                  dtype_name(cache.scalar_type()), " like its cache, got ",
                  dtype_name(entry.scalar_type()));
  }
  return check_written("caches", caches);
}

void kv_append_(std::vector<Tensor> caches, std::vector<Tensor> entries, Tensor positions) {
  entries = read_first(entries, check_append(caches, entries, positions));
  const std::vector<KvTensor> tensors = kv_tensors(caches, entries);
  const KvAppendParams p = {tensors.data(), static_cast<int64_t>(tensors.size()), positions.size(0),
                            kv_vector<const void>(positions)};
  launch(positions, p, SPECDEC_PLAIN_LAUNCHERS(KvAppendParams, kv_append));
}

void check_truncate(const std::vector<Tensor>& caches, const Tensor& lengths,
                    const Tensor& new_lengths, bool /*zero_fill*/) {
  const int64_t batch = check_batch("lengths", lengths);
  check_integers("new_lengths", new_lengths, batch, lengths, "lengths");
  check_caches("caches", caches, lengths, "positions or lengths");
  check_not_expanded("lengths", lengths);
}

void kv_truncate_(std::vector<Tensor> caches, Tensor lengths, Tensor new_lengths, bool zero_fill) {
  check_truncate(caches, lengths, new_lengths, zero_fill);
  new_lengths = read_first(new_lengths, lengths);
  const std::vector<KvTensor> tensors = kv_tensors(caches);
  const KvTruncateParams p = {
      tensors.data(),           static_cast<int64_t>(tensors.size()), lengths.size(0),
      kv_vector<void>(lengths), kv_vector<const void>(new_lengths),   zero_fill};
  launch(lengths, p, SPECDEC_PLAIN_LAUNCHERS(KvTruncateParams, kv_truncate));
}

void check_compact(const std::vector<Tensor>& caches, const Tensor& base, const Tensor& path) {
  const int64_t batch = check_batch("base", base);
  check_path(path, batch, base);
  check_caches("caches", caches, base, "base");
  check_written("caches", caches);
}

void kv_compact_(std::vector<Tensor> caches, Tensor base, Tensor path) {
  check_compact(caches, base, path);
  const std::vector<KvTensor> tensors = kv_tensors(caches);
  const KvCompactParams p = {tensors.data(), static_cast<int64_t>(tensors.size()), base.size(0),
                             kv_vector<const void>(base), kv_table<const void>(path)};
  launch(base, p, SPECDEC_PLAIN_LAUNCHERS(KvCompactParams, kv_compact));
}

void check_paged_compact(const std::vector<Tensor>& caches, const Tensor& block_tables,
                         const Tensor& base, const Tensor& path) {
  const int64_t batch = check_batch("base", base);
  check_path(path, batch, base);
  check_block_tables(block_tables, batch, base, "base");
  check_paged_caches(caches, base, "base");
  check_written("caches", caches);
}

void paged_compact_(std::vector<Tensor> caches, Tensor block_tables, Tensor base, Tensor path) {
  check_paged_compact(caches, block_tables, base, path);
  const std::vector<KvTensor> tensors = kv_tensors(caches, 1);
  const PagedCompactParams p = {
      {tensors.data(), static_cast<int64_t>(tensors.size()), base.size(0),
       kv_vector<const void>(base), kv_table<const void>(path)},
      {kv_table<const void>(block_tables), caches.empty() ? 0 : caches[0].size(0)}};
  launch(base, p, SPECDEC_PLAIN_LAUNCHERS(PagedCompactParams, paged_compact));
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

void check_paged_truncate(const Tensor& block_tables, const Tensor& lengths,
                          const Tensor& new_lengths, int64_t block_size) {
  const int64_t batch = check_batch("lengths", lengths);
  check_integers("new_lengths", new_lengths, batch, lengths, "lengths");
  check_block_tables(block_tables, batch, lengths, "lengths");
  check_not_expanded("block_tables", block_tables);
  check_not_expanded("lengths", lengths);
  SPECDEC_CHECK(block_size >= 1, "block_size must be at least 1, got ", block_size);
}

void truncate_tables_(const Tensor& block_tables, const Tensor& lengths, Tensor new_lengths,
                      int64_t block_size, const FreedBlocks& out) {
  check_paged_truncate(block_tables, lengths, new_lengths, block_size);
  new_lengths = read_first(new_lengths, lengths);
  const PagedTruncateParams p = {kv_table<void>(block_tables),
                                 lengths.size(0),
                                 block_size,
                                 kv_vector<void>(lengths),
                                 kv_vector<const void>(new_lengths),
                                 {out.blocks, block_tables.scalar_type() == ScalarType::Long},
                                 out.num_freed};
  launch(lengths, p, SPECDEC_PLAIN_LAUNCHERS(PagedTruncateParams, paged_truncate));
}

}  // namespace specdec
