#pragma once
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

namespace specdec {

// By value, as the boxing of the stable ABI wants them.
std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> expand_tree(
    torch::stable::Tensor logits, torch::stable::Tensor scores, int64_t width,
    std::optional<torch::stable::Tensor> temperatures, double temperature);

}  // namespace specdec
