#pragma once
#include <torch/csrc/stable/tensor.h>

#include <vector>

namespace specdec {

// By value, as the boxing of the stable ABI wants them.
void kv_append_(std::vector<torch::stable::Tensor> caches,
                std::vector<torch::stable::Tensor> entries, torch::stable::Tensor positions);
void kv_truncate_(std::vector<torch::stable::Tensor> caches, torch::stable::Tensor lengths,
                  torch::stable::Tensor new_lengths, bool zero_fill);
void kv_compact_(std::vector<torch::stable::Tensor> caches, torch::stable::Tensor base,
                 torch::stable::Tensor path);
void paged_compact_(std::vector<torch::stable::Tensor> caches, torch::stable::Tensor block_tables,
                    torch::stable::Tensor base, torch::stable::Tensor path);

}  // namespace specdec
