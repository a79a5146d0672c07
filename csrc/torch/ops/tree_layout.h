#pragma once
#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace specdec {

// By value, as the boxing of the stable ABI wants them.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> tree_attention(
    torch::stable::Tensor parents, torch::stable::Tensor lengths, int64_t slots, int64_t window);
std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> rerank_tree(
    torch::stable::Tensor tokens, torch::stable::Tensor parents, torch::stable::Tensor scores,
    int64_t size);
std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor,
           torch::stable::Tensor>
build_trie(torch::stable::Tensor sequences, int64_t size, bool merge);

}  // namespace specdec
