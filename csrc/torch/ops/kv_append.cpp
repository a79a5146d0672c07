#include "specdec/kv.h"
#include "torch/arguments/kv.h"
#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {
namespace {

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

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("kv_append_(Tensor(a!)[] caches, Tensor[] entries, Tensor positions) -> ()");
  m.def("validate_kv_append_(Tensor[] caches, Tensor[] entries, Tensor positions) -> ()");
}
SPECDEC_IMPLEMENT(kv_append_)
SPECDEC_VALIDATE(kv_append_, check_append)

}  // namespace
}  // namespace specdec
