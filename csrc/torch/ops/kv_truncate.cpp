#include "specdec/kv.h"
#include "torch/arguments/kv.h"
#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {
namespace {

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

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "kv_truncate_(Tensor(a!)[] caches, Tensor(b!) lengths, Tensor new_lengths, "
      "bool zero_fill) -> ()");
  m.def(
      "validate_kv_truncate_(Tensor[] caches, Tensor lengths, Tensor new_lengths, "
      "bool zero_fill) -> ()");
}
SPECDEC_IMPLEMENT(kv_truncate_)
SPECDEC_VALIDATE(kv_truncate_, check_truncate)

}  // namespace
}  // namespace specdec
