#pragma once
// The ops as the dispatcher sees them; schemas are in registration.cpp.
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace specdec {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sample(
    Tensor logits, std::optional<Tensor> temperatures, double temperature,
    std::optional<Tensor> top_ks, int64_t top_k, std::optional<Tensor> top_ps, double top_p,
    std::optional<Tensor> min_ps, double min_p, Tensor seeds, Tensor positions, std::string stream,
    std::string method);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> verify_chain(
    Tensor target, Tensor draft_token_ids, std::optional<Tensor> draft,
    std::optional<Tensor> draft_ids, std::optional<Tensor> draft_columns,
    std::optional<Tensor> draft_logsumexp, std::optional<Tensor> draft_threshold,
    std::optional<Tensor> draft_temperatures, double draft_temperature, std::string kind,
    std::string rule, std::optional<Tensor> temperatures, double temperature,
    std::optional<Tensor> top_ks, int64_t top_k, std::optional<Tensor> top_ps, double top_p,
    std::optional<Tensor> min_ps, double min_p, Tensor seeds, Tensor positions,
    std::optional<Tensor> target_indptr, std::optional<Tensor> uniforms, double lenience,
    double typical_epsilon, double typical_delta, std::optional<Tensor> synthetic_rates,
    std::optional<Tensor> eos_token_ids, std::optional<Tensor> max_new_tokens, bool with_logprobs,
    bool with_accept_probs);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> verify_tree(
    Tensor target, Tensor tree_tokens, Tensor parents, std::optional<Tensor> draft,
    std::optional<Tensor> draft_ids, std::optional<Tensor> draft_columns,
    std::optional<Tensor> draft_logsumexp, std::optional<Tensor> draft_threshold,
    std::optional<Tensor> draft_temperatures, double draft_temperature,
    std::optional<Tensor> draft_rows, std::string kind, std::string rule,
    std::optional<Tensor> temperatures, double temperature, std::optional<Tensor> top_ks,
    int64_t top_k, std::optional<Tensor> top_ps, double top_p, std::optional<Tensor> min_ps,
    double min_p, Tensor seeds, Tensor positions, std::optional<Tensor> target_indptr,
    std::optional<Tensor> uniforms, double typical_epsilon, double typical_delta,
    std::optional<Tensor> eos_token_ids, std::optional<Tensor> max_new_tokens, int64_t max_depth,
    bool with_logprobs, bool with_accept_probs);

// How the CUDA kernels share work out from now on; no result depends on it.
void set_cuda_schedule(std::string schedule, int64_t team);

}  // namespace specdec
