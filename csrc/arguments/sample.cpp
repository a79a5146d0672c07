#include "arguments/sample.h"

namespace specdec {
namespace {

NoiseStream stream_of(Noise noise) {
  switch (noise) {
    case Noise::kResidual:
      return kResidualStream;
    case Noise::kDraft:
      return kDraftStream;
    default:
      return kSharedStream;
  }
}

}  // namespace

void SampleArguments::check() const {
  SPECDEC_CHECK(logits.dim() == 2, "logits must be [R, V], got ", shape_of(logits));
  check_rows("logits", logits);
  check_entries("logits", "the outputs", "[R]", {logits.size(0)});
  const int64_t n = logits.size(0);
  sampling.check(n, logits, "logits");
  if (token_bitmask) {
    check_bitmask("token_bitmask", *token_bitmask, "logits", logits);
    check_same_device("token_bitmask", *token_bitmask, logits, "logits");
  }
  check_integers("seeds", seeds, n, logits, "logits");
  check_integers("positions", positions, n, logits, "logits");
  const bool shared = checked_noise() == Noise::kShared;
  SPECDEC_CHECK(checked_method() == Method::kGumbel || !shared,
                "method must be gumbel when noise is shared, got cdf");
}

std::array<Output, 5> SampleArguments::outputs() const {
  const int64_t n = logits.size(0);
  return {{{"[R]", ScalarType::Long, n},
           {"[R]", ScalarType::Float, n},
           {"[R]", ScalarType::Double, n},
           {"[R]", ScalarType::Float, n},
           {"[R]", ScalarType::Int, n}}};
}

SampleParams SampleArguments::params(const SampleOutputs& out) {
  const auto& [tokens, logprobs, logsumexp, threshold, status] = out;
  seeds = dense_int64(seeds);
  positions = dense_int64(positions);
  SampleParams p{};
  p.logits = {logits.const_data_ptr(), row_dtype(logits), logits.stride(0), 0,
              bitmask_of(token_bitmask, false)};
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
  p.stream = stream_of(checked_noise());
  p.gumbel = checked_method() == Method::kGumbel;
  return p;
}

}  // namespace specdec
