#include "specdec/kv.h"
#include "torch/arguments/kv.h"
#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {
namespace {

void kv_truncate_(std::vector<Tensor> caches, Tensor lengths, Tensor new_lengths, bool zero_fill) {
  const int64_t batch = check_batch("lengths", lengths);
  check_vector("new_lengths", new_lengths, batch, ScalarType::Long, lengths, "lengths");
  check_caches("caches", caches, lengths, "positions or lengths");
  check_not_expanded("lengths", lengths);
  new_lengths = read_first(new_lengths, lengths);
  const std::vector<KvTensor> tensors = kv_tensors(caches);
  const KvTruncateParams p = {tensors.data(),
                              static_cast<int64_t>(tensors.size()),
                              batch,
                              kv_vector<int64_t>(lengths),
                              kv_vector<const int64_t>(new_lengths),
                              zero_fill};
  launch(lengths, p, SPECDEC_PLAIN_LAUNCHERS(KvTruncateParams, kv_truncate));
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "kv_truncate_(Tensor(a!)[] caches, Tensor(b!) lengths, Tensor new_lengths, "
      "bool zero_fill) -> ()");
}
SPECDEC_IMPLEMENT(kv_truncate_)

}  // namespace
}  // namespace specdec
