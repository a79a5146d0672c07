#include "specdec/ring_truncate.h"

#include <algorithm>

#include "arguments/kv.h"
#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {
namespace {

void check_ring_truncate(const std::vector<Tensor>& caches, const Tensor& lengths,
                         const Tensor& new_lengths, int64_t window, bool /*zero_fill*/) {
  const int64_t batch = check_batch("lengths", lengths);
  check_integers("new_lengths", new_lengths, batch, lengths, "lengths");
  check_caches("caches", caches, lengths, "lengths");
  check_not_expanded("lengths", lengths);
  SPECDEC_CHECK(window >= 1, "window must be at least 1, got ", window);
  for (size_t i = 0; i < caches.size(); ++i) {
    const int64_t size = caches[i].size(2);
    SPECDEC_CHECK(window <= size, "window must be at most the slots of caches[", i, "], ", size,
                  ", got ", window);
  }
}

Tensor ring_truncate_(std::vector<Tensor> caches, Tensor lengths, Tensor new_lengths,
                      int64_t window, bool zero_fill) {
  check_ring_truncate(caches, lengths, new_lengths, window, zero_fill);
  new_lengths = read_first(new_lengths, lengths);
  const int64_t batch = lengths.size(0);
  int64_t slots = caches.empty() ? 0 : caches[0].size(2);
  for (const Tensor& cache : caches) slots = std::min(slots, cache.size(2));
  Tensor status = torch::stable::new_empty(lengths, {batch}, ScalarType::Int);
  const std::vector<KvTensor> tensors = kv_tensors(caches);
  const RingTruncateParams p = {tensors.data(),
                                static_cast<int64_t>(tensors.size()),
                                batch,
                                slots,
                                window,
                                kv_vector<void>(lengths),
                                kv_vector<const void>(new_lengths),
                                status.mutable_data_ptr<int32_t>(),
                                zero_fill};
  launch(lengths, p, SPECDEC_PLAIN_LAUNCHERS(RingTruncateParams, ring_truncate));
  return status;
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "ring_truncate_(Tensor(a!)[] caches, Tensor(b!) lengths, Tensor new_lengths, int window, "
      "bool zero_fill) -> Tensor status");
  m.def(
      "validate_ring_truncate_(Tensor[] caches, Tensor lengths, Tensor new_lengths, int window, "
      "bool zero_fill) -> ()");
}
SPECDEC_IMPLEMENT(ring_truncate_)
SPECDEC_VALIDATE(ring_truncate_, check_ring_truncate)

}  // namespace
}  // namespace specdec
