#include "specdec/kv.h"
#include "torch/arguments/kv.h"
#include "torch/ops/kv.h"

namespace specdec {

constexpr const char* kOfCaches = "positions or lengths";

void kv_append_(std::vector<Tensor> caches, std::vector<Tensor> entries, Tensor positions) {
  const int64_t batch = check_batch("positions", positions);
  SPECDEC_CHECK(caches.size() == entries.size(), "entries must have one tensor for each of the ",
                caches.size(), " caches, got ", entries.size());
  check_caches("caches", caches, positions, kOfCaches);
  check_caches("entries", entries, positions, kOfCaches);
  for (size_t i = 0; i < caches.size(); ++i) {
    const Tensor &cache = caches[i], &entry = entries[i];
    SPECDEC_CHECK(entry.size(1) == cache.size(1) && entry.size(3) == cache.size(3), "entries[", i,
                  "] must be [B, H, n, D] = [", batch, ", ", cache.size(1), ", n, ", cache.size(3),
                  "], got ", shape_of(entry));
    SPECDEC_CHECK(entry.scalar_type() == cache.scalar_type(), "entries[", i, "] must be ",
                  dtype_name(cache.scalar_type()), " like its cache, got ",
                  dtype_name(entry.scalar_type()));
  }
  const std::vector<KvTensor> tensors = kv_tensors(caches, entries);
  const KvAppendParams p = {tensors.data(), static_cast<int64_t>(tensors.size()), batch,
                            kv_vector<const int64_t>(positions)};
  run_where<KvAppendParams>(positions, p, SPECDEC_KV_LAUNCHERS(kv_append));
}

void kv_truncate_(std::vector<Tensor> caches, Tensor lengths, Tensor new_lengths, bool zero_fill) {
  const int64_t batch = check_batch("lengths", lengths);
  check_vector("new_lengths", new_lengths, batch, ScalarType::Long, lengths, "lengths");
  check_caches("caches", caches, lengths, kOfCaches);
  const std::vector<KvTensor> tensors = kv_tensors(caches);
  const KvTruncateParams p = {tensors.data(),
                              static_cast<int64_t>(tensors.size()),
                              batch,
                              kv_vector<int64_t>(lengths),
                              kv_vector<const int64_t>(new_lengths),
                              zero_fill};
  run_where<KvTruncateParams>(lengths, p, SPECDEC_KV_LAUNCHERS(kv_truncate));
}

}  // namespace specdec
