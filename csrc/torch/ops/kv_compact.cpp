#include "specdec/kv_compact.h"

#include "torch/arguments/kv.h"
#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {
namespace {

void check_path(const Tensor& path, int64_t batch, const Tensor& base) {
  SPECDEC_CHECK(path.dim() == 2 && path.size(0) == batch, "path must be [B, P] with B = ", batch,
                ", got ", shape_of(path));
  check_ids("path", path);
  check_same_device("path", path, base, "base");
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

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("kv_compact_(Tensor(a!)[] caches, Tensor base, Tensor path) -> ()");
  m.def("validate_kv_compact_(Tensor[] caches, Tensor base, Tensor path) -> ()");
  m.def("paged_compact_(Tensor(a!)[] caches, Tensor block_tables, Tensor base, Tensor path) -> ()");
  m.def(
      "validate_paged_compact_(Tensor[] caches, Tensor block_tables, Tensor base, "
      "Tensor path) -> ()");
}
SPECDEC_IMPLEMENT(kv_compact_)
SPECDEC_VALIDATE(kv_compact_, check_compact)
SPECDEC_IMPLEMENT(paged_compact_)
SPECDEC_VALIDATE(paged_compact_, check_paged_compact)

}  // namespace
}  // namespace specdec
