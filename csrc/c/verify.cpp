// sample, verify_chain and verify_tree.
#include "arguments/chain.h"
#include "arguments/sample.h"
#include "arguments/tree.h"
#include "c/call.h"

namespace specdec::c {
namespace {

struct Sample {
  using Args = specdec_sample_args;
  using Arguments = SampleArguments;
  using Params = SampleParams;
  static constexpr size_t kRequired = offsetof(Args, temperatures);
  static constexpr auto kKernels = SPECDEC_LAUNCHERS(Params, sample);

  static auto fields(Args& a) {
    return std::tie(a.logits, a.temperatures, a.temperature, a.top_ks, a.top_k, a.top_ps, a.top_p,
                    a.min_ps, a.min_p, a.token_bitmask, a.seeds, a.positions, a.noise, a.method);
  }
  static void set_defaults(Arguments& arguments) {
    arguments.noise = static_cast<int64_t>(Noise::kDraft);
  }
  static SampleOutputs outputs(const Args& a, const Arguments& given) {
    const int64_t n = given.logits.size(0);
    return {output("tokens", a.tokens, n), output("logprobs", a.logprobs, n),
            output("logsumexp", a.logsumexp, n), output("threshold", a.threshold, n),
            output("status", a.status, n)};
  }
};

struct Chain {
  using Args = specdec_verify_chain_args;
  using Arguments = ChainArguments;
  using Params = ChainParams;
  static constexpr size_t kRequired = offsetof(Args, draft);
  static constexpr auto kKernels = SPECDEC_LAUNCHERS(Params, verify_chain);

  static auto fields(Args& a) {
    return std::tie(
        a.target, a.draft_token_ids, a.draft, a.draft_ids, a.draft_columns, a.draft_logsumexp,
        a.draft_threshold, a.draft_temperatures, a.draft_temperature, a.draft_bitmask, a.draft_rows,
        a.kind, a.rule, a.temperatures, a.temperature, a.top_ks, a.top_k, a.top_ps, a.top_p,
        a.min_ps, a.min_p, a.token_bitmask, a.seeds, a.positions, a.target_indptr, a.uniforms,
        a.lenience, a.typical_epsilon, a.typical_delta, a.top_beta_rank, a.top_beta_distance,
        a.synthetic_rates, a.eos_token_ids, a.max_new_tokens, a.logprobs, a.accept_probs);
  }
  static void set_defaults(Arguments& arguments) { arguments.set_defaults(); }
  static ChainOutputs outputs(const Args& a, const Arguments& given) {
    const int64_t b = given.drafted.size(0);
    return {output("tokens", a.tokens, b), output("num_accepted", a.num_accepted, b),
            output("status", a.status, b), output("logprobs", a.logprobs, 0),
            output("accept_probs", a.accept_probs, 0)};
  }
};

struct Tree {
  using Args = specdec_verify_tree_args;
  using Arguments = TreeArguments;
  using Params = TreeParams;
  static constexpr size_t kRequired = offsetof(Args, draft);
  static constexpr auto kKernels = SPECDEC_LAUNCHERS(Params, verify_tree);

  static auto fields(Args& a) {
    return std::tie(a.target, a.tree_tokens, a.parents, a.draft, a.draft_ids, a.draft_columns,
                    a.draft_logsumexp, a.draft_threshold, a.draft_temperatures, a.draft_temperature,
                    a.draft_bitmask, a.draft_rows, a.kind, a.rule, a.temperatures, a.temperature,
                    a.top_ks, a.top_k, a.top_ps, a.top_p, a.min_ps, a.min_p, a.token_bitmask,
                    a.seeds, a.positions, a.target_indptr, a.uniforms, a.typical_epsilon,
                    a.typical_delta, a.eos_token_ids, a.max_new_tokens, a.max_depth, a.logprobs,
                    a.accept_probs);
  }
  static void set_defaults(Arguments& arguments) {
    arguments.set_defaults();
    arguments.rule = arguments.max_depth = -1;  // out of range
  }
  static TreeOutputs outputs(const Args& a, const Arguments& given) {
    const int64_t b = given.drafted.size(0);
    return {output("path", a.path, b * given.max_depth), output("tokens", a.tokens, b),
            output("num_accepted", a.num_accepted, b),   output("status", a.status, b),
            output("logprobs", a.logprobs, 0),           output("accept_probs", a.accept_probs, 0)};
  }
};

}  // namespace
}  // namespace specdec::c

SPECDEC_DEFINE(sample, specdec::c::Sample)
SPECDEC_DEFINE(verify_chain, specdec::c::Chain)
SPECDEC_DEFINE(verify_tree, specdec::c::Tree)
