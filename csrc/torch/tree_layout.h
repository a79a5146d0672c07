#pragma once
#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace specdec {

// By value, as the boxing of the stable ABI wants them.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> tree_attention(
    torch::stable::Tensor parents, torch::stable::Tensor lengths, int64_t slots, int64_t window);

}  // namespace specdec
