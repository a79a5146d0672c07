#include "specdec/sample.h"

#include "torch/arguments/checks.h"
#include "torch/provider.h"
#include "torch/register.h"

namespace specdec {
namespace {

uint32_t noise_stream(const std::string& noise) {
  if (noise == "residual") return kResidualStream;
  if (noise == "draft") return kDraftStream;
  SPECDEC_CHECK(noise == "shared", "noise must be one of residual, draft, shared, got ", noise);
  return kSharedStream;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sample(
    Tensor logits, std::optional<Tensor> temperatures, double temperature,
    std::optional<Tensor> top_ks, int64_t top_k, std::optional<Tensor> top_ps, double top_p,
    std::optional<Tensor> min_ps, double min_p, Tensor seeds, Tensor positions, std::string noise,
    std::string method) {
  SPECDEC_CHECK(logits.dim() == 2, "logits must be [R, V], got ", shape_of(logits));
  check_rows("logits", logits);
  const int64_t n = logits.size(0);
  SamplingArguments sampling{temperatures, temperature, top_ks, top_k,
                             top_ps,       top_p,       min_ps, min_p};
  sampling.check_all(n, logits, "logits");
  check_vector("seeds", seeds, n, ScalarType::Long, logits, "logits");
  check_vector("positions", positions, n, ScalarType::Long, logits, "logits");
  const uint32_t number = noise_stream(noise);
  SPECDEC_CHECK(method == "cdf" || method == "gumbel", "method must be one of cdf, gumbel, got ",
                method);
  SPECDEC_CHECK(number != kSharedStream || method == "gumbel",
                "method must be gumbel when noise is shared, got cdf");

  const auto output = [&](ScalarType dtype) {
    return torch::stable::new_empty(logits, {n}, dtype);
  };
  Tensor tokens = output(ScalarType::Long), logprobs = output(ScalarType::Float),
         logsumexp = output(ScalarType::Double), threshold = output(ScalarType::Float),
         status = output(ScalarType::Int);
  seeds = dense(seeds);
  positions = dense(positions);
  SampleParams p{};
  p.logits = {logits.const_data_ptr(), row_dtype(logits), logits.stride(0), 0};
  p.sampling = sampling.params();
  p.seeds = seeds.const_data_ptr<int64_t>();
  p.positions = positions.const_data_ptr<int64_t>();
  p.tokens = tokens.mutable_data_ptr<int64_t>();
  p.logprobs = logprobs.mutable_data_ptr<float>();
  p.logsumexp = logsumexp.mutable_data_ptr<double>();
  p.threshold = threshold.mutable_data_ptr<float>();
  p.status = status.mutable_data_ptr<int32_t>();
  p.num_rows = n;
  p.vocab = logits.size(1);
  p.stream = number;
  p.gumbel = method == "gumbel";
  run_where<SampleParams>(logits, p, SPECDEC_LAUNCHERS(sample));
  return {tokens, logprobs, logsumexp, threshold, status};
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "sample(Tensor logits, Tensor? temperatures, float temperature, Tensor? top_ks, int top_k, "
      "Tensor? top_ps, float top_p, Tensor? min_ps, float min_p, Tensor seeds, Tensor positions, "
      "str noise, str method) -> (Tensor tokens, Tensor logprobs, Tensor logsumexp, "
      "Tensor threshold, Tensor status)");
}
SPECDEC_IMPLEMENT(sample)

}  // namespace
}  // namespace specdec
