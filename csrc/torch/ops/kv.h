#pragma once
#include <torch/csrc/stable/tensor.h>

#include <tuple>
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
std::tuple<torch::stable::Tensor, torch::stable::Tensor> paged_truncate_(
    torch::stable::Tensor block_tables, torch::stable::Tensor lengths,
    torch::stable::Tensor new_lengths, int64_t block_size);
void kv_realign_(std::vector<torch::stable::Tensor> caches, torch::stable::Tensor starts,
                 torch::stable::Tensor lengths, torch::stable::Tensor shifts, bool zero_fill);
torch::stable::Tensor ring_truncate_(std::vector<torch::stable::Tensor> caches,
                                     torch::stable::Tensor lengths,
                                     torch::stable::Tensor new_lengths, int64_t window,
                                     bool zero_fill);

}  // namespace specdec
