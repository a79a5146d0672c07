#include "torch/arguments/sample.h"

#include <array>

namespace specdec {
namespace {

constexpr std::array<const char*, 3> kNoises = {"residual", "draft", "shared"};
constexpr std::array<NoiseStream, 3> kStreams = {kResidualStream, kDraftStream, kSharedStream};
constexpr std::array<const char*, 2> kMethods = {"cdf", "gumbel"};

NoiseStream noise_stream(const std::string& noise) {
  return kStreams[one_of("noise", noise, kNoises.data(), kNoises.size())];
}

}  // namespace

void SampleArguments::check() const {
  SPECDEC_CHECK(logits.dim() == 2, "logits must be [R, V], got ", shape_of(logits));
  check_rows("logits", logits);
  const int64_t n = logits.size(0);
  sampling.check(n, logits, "logits");
  check_vector("seeds", seeds, n, ScalarType::Long, logits, "logits");
  check_vector("positions", positions, n, ScalarType::Long, logits, "logits");
  noise_stream(noise);
  one_of("method", method, kMethods.data(), kMethods.size());
  SPECDEC_CHECK(noise != "shared" || method == "gumbel",
                "method must be gumbel when noise is shared, got cdf");
}

SampleOutputs SampleArguments::new_outputs() const {
  const auto output = [&](ScalarType dtype) {
    return torch::stable::new_empty(logits, {logits.size(0)}, dtype);
  };
  return {output(ScalarType::Long), output(ScalarType::Float), output(ScalarType::Double),
          output(ScalarType::Float), output(ScalarType::Int)};
}

SampleParams SampleArguments::params(const SampleOutputs& out) {
  const auto& [tokens, logprobs, logsumexp, threshold, status] = out;
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
  p.num_rows = logits.size(0);
  p.vocab = logits.size(1);
  p.stream = noise_stream(noise);
  p.gumbel = method == "gumbel";
  return p;
}

}  // namespace specdec
