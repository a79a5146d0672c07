#pragma once
// The arguments of sample by name and their validation.
#include <array>
#include <tuple>

#include "arguments/checks.h"
#include "arguments/output.h"
#include "specdec/sample.h"

namespace specdec {

using SampleOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// In the order of NOISES and METHODS in specdec_kernels/arguments/rules.py.
enum class Noise : int64_t { kResidual, kDraft, kShared };
enum class Method : int64_t { kCdf, kGumbel };

struct SampleArguments {
  using Outputs = SampleOutputs;
  static constexpr std::array kOutputs = {"tokens", "logprobs", "logsumexp", "threshold", "status"};

  Tensor logits;
  SamplingArguments sampling;
  std::optional<Tensor> token_bitmask;
  Tensor seeds, positions;
  int64_t noise, method;  // the numbers of Noise and Method

  auto arguments() {
    return std::tuple_cat(
        std::make_tuple(argument("logits", logits)), sampling.arguments(),
        std::make_tuple(argument("token_bitmask", token_bitmask), argument("seeds", seeds),
                        argument("positions", positions), argument("noise", noise),
                        argument("method", method)));
  }
  // Throws a message that names the argument, the rule and the value.
  void check() const;
  std::array<Output, kOutputs.size()> outputs() const;
  // Pointers into these arguments, which become contiguous where kernels need it, and into `out`.
  SampleParams params(const SampleOutputs& out);
  // The op.
  SampleOutputs run();
  // Writes the results into `out`. CUDA kernels work in memory that is allocated, if there is no
  // workspace.
  void run_into(const SampleOutputs& out, const std::optional<Tensor>& workspace = {});

 private:
  Noise checked_noise() const { return enum_of("noise", noise, Noise::kShared); }
  Method checked_method() const { return enum_of("method", method, Method::kGumbel); }
};

}  // namespace specdec
