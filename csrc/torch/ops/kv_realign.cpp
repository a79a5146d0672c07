#include "specdec/kv_realign.h"

#include "arguments/kv.h"
#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {
namespace {

void check_realign(const std::vector<Tensor>& caches, const Tensor& starts, const Tensor& lengths,
                   const Tensor& shifts, bool /*zero_fill*/) {
  const int64_t batch = check_batch("starts", starts);
  check_integers("lengths", lengths, batch, starts, "starts");
  check_integers("shifts", shifts, batch, starts, "starts");
  check_caches("caches", caches, starts, "starts");
  check_written("caches", caches);
}

void kv_realign_(std::vector<Tensor> caches, Tensor starts, Tensor lengths, Tensor shifts,
                 bool zero_fill) {
  check_realign(caches, starts, lengths, shifts, zero_fill);
  const std::vector<KvTensor> tensors = kv_tensors(caches);
  const KvRealignParams p = {tensors.data(),
                             static_cast<int64_t>(tensors.size()),
                             starts.size(0),
                             kv_vector<const void>(starts),
                             kv_vector<const void>(lengths),
                             kv_vector<const void>(shifts),
                             zero_fill};
  launch(starts, p, SPECDEC_PLAIN_LAUNCHERS(KvRealignParams, kv_realign));
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "kv_realign_(Tensor(a!)[] caches, Tensor starts, Tensor lengths, Tensor shifts, "
      "bool zero_fill) -> ()");
  m.def(
      "validate_kv_realign_(Tensor[] caches, Tensor starts, Tensor lengths, Tensor shifts, "
      "bool zero_fill) -> ()");
}
SPECDEC_IMPLEMENT(kv_realign_)
SPECDEC_VALIDATE(kv_realign_, check_realign)

}  // namespace
}  // namespace specdec
