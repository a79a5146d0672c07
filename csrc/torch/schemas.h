#pragma once
// Schemas of the ops that the tests also register under another name.

namespace specdec {

constexpr const char* kSampleSchema =
    "sample(Tensor logits, Tensor? temperatures, float temperature, Tensor? top_ks, int top_k, "
    "Tensor? top_ps, float top_p, Tensor? min_ps, float min_p, Tensor seeds, Tensor positions, "
    "str stream, str method) -> (Tensor tokens, Tensor logprobs, Tensor logsumexp, "
    "Tensor threshold, Tensor status)";

constexpr const char* kVerifyChainSchema =
    "verify_chain(Tensor target, Tensor draft_tokens, Tensor? draft, Tensor? draft_ids, "
    "Tensor? draft_columns, Tensor? draft_logsumexp, Tensor? draft_threshold, "
    "Tensor? draft_temperatures, float draft_temperature, str kind, str rule, "
    "Tensor? temperatures, float temperature, Tensor? top_ks, int top_k, Tensor? top_ps, "
    "float top_p, Tensor? min_ps, float min_p, Tensor seeds, Tensor positions, "
    "Tensor? cu_rows, Tensor? uniforms, float lenience, float typical_epsilon, "
    "float typical_delta, Tensor? synthetic_rates, Tensor? eos_ids, Tensor? max_emit, "
    "bool with_logprobs, bool with_acceptance) -> (Tensor tokens, Tensor num_accepted, "
    "Tensor status, Tensor logprobs, Tensor acceptance)";

constexpr const char* kVerifyTreeSchema =
    "verify_tree(Tensor target, Tensor tree_tokens, Tensor parents, Tensor? draft, "
    "Tensor? draft_ids, Tensor? draft_columns, Tensor? draft_logsumexp, Tensor? draft_threshold, "
    "Tensor? draft_temperatures, float draft_temperature, Tensor? draft_rows, str kind, str rule, "
    "Tensor? temperatures, float temperature, Tensor? top_ks, int top_k, Tensor? top_ps, "
    "float top_p, Tensor? min_ps, float min_p, Tensor seeds, Tensor positions, "
    "Tensor? cu_rows, Tensor? uniforms, float typical_epsilon, float typical_delta, "
    "Tensor? eos_ids, Tensor? max_emit, int max_depth, bool with_logprobs, bool with_acceptance) "
    "-> (Tensor path, Tensor tokens, Tensor num_accepted, Tensor status, Tensor logprobs, "
    "Tensor acceptance)";

}  // namespace specdec
