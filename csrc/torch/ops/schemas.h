#pragma once
// Schemas of the ops that the tests also register under another name.

namespace specdec {

constexpr const char* kSampleSchema =
    "sample(Tensor logits, Tensor? temperatures, float temperature, Tensor? top_ks, int top_k, "
    "Tensor? top_ps, float top_p, Tensor? min_ps, float min_p, Tensor seeds, Tensor positions, "
    "str noise, str method) -> (Tensor tokens, Tensor logprobs, Tensor logsumexp, "
    "Tensor threshold, Tensor status)";

constexpr const char* kVerifyChainSchema =
    "verify_chain(Tensor target, Tensor draft_token_ids, Tensor? draft, Tensor? draft_ids, "
    "Tensor? draft_columns, Tensor? draft_logsumexp, Tensor? draft_threshold, "
    "Tensor? draft_temperatures, float draft_temperature, str kind, str rule, "
    "Tensor? temperatures, float temperature, Tensor? top_ks, int top_k, Tensor? top_ps, "
    "float top_p, Tensor? min_ps, float min_p, Tensor seeds, Tensor positions, "
    "Tensor? target_indptr, Tensor? uniforms, float lenience, float typical_epsilon, "
    "float typical_delta, Tensor? synthetic_rates, Tensor? eos_token_ids, Tensor? max_new_tokens, "
    "bool with_logprobs, bool with_accept_probs) -> (Tensor tokens, Tensor num_accepted, "
    "Tensor status, Tensor logprobs, Tensor accept_probs)";

constexpr const char* kVerifyTreeSchema =
    "verify_tree(Tensor target, Tensor tree_tokens, Tensor parents, Tensor? draft, "
    "Tensor? draft_ids, Tensor? draft_columns, Tensor? draft_logsumexp, Tensor? draft_threshold, "
    "Tensor? draft_temperatures, float draft_temperature, Tensor? draft_rows, str kind, str rule, "
    "Tensor? temperatures, float temperature, Tensor? top_ks, int top_k, Tensor? top_ps, "
    "float top_p, Tensor? min_ps, float min_p, Tensor seeds, Tensor positions, "
    "Tensor? target_indptr, Tensor? uniforms, float typical_epsilon, float typical_delta, "
    "Tensor? eos_token_ids, Tensor? max_new_tokens, SymInt max_depth, bool with_logprobs, bool "
    "with_accept_probs) "
    "-> (Tensor path, Tensor tokens, Tensor num_accepted, Tensor status, Tensor logprobs, "
    "Tensor accept_probs)";

constexpr const char* kKvAppendSchema =
    "kv_append_(Tensor(a!)[] caches, Tensor[] entries, Tensor positions) -> ()";

constexpr const char* kKvTruncateSchema =
    "kv_truncate_(Tensor(a!)[] caches, Tensor(b!) lengths, Tensor new_lengths, bool "
    "zero_fill) -> ()";

constexpr const char* kKvCompactSchema =
    "kv_compact_(Tensor(a!)[] caches, Tensor base, Tensor path) -> ()";

constexpr const char* kPagedCompactSchema =
    "paged_compact_(Tensor(a!)[] caches, Tensor block_tables, Tensor base, Tensor path) -> ()";

constexpr const char* kPagedTruncateSchema =
    "paged_truncate_(Tensor(a!) block_tables, Tensor(b!) lengths, Tensor new_lengths, int "
    "block_size) -> (Tensor blocks, Tensor num_freed)";

constexpr const char* kKvRealignSchema =
    "kv_realign_(Tensor(a!)[] caches, Tensor starts, Tensor lengths, Tensor shifts, bool "
    "zero_fill) -> ()";

constexpr const char* kRingTruncateSchema =
    "ring_truncate_(Tensor(a!)[] caches, Tensor(b!) lengths, Tensor new_lengths, int window, "
    "bool zero_fill) -> Tensor status";

}  // namespace specdec
