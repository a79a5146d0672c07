#pragma once
// The ops that append to caches, truncate and compact them, and their validation, which throws a
// message that names the argument, the rule and the value.
#include <optional>
#include <vector>

#include "arguments/kv.h"

namespace specdec {

Extents check_append(const std::vector<Tensor>& caches, const std::vector<Tensor>& entries,
                     const Tensor& positions);
void kv_append_(std::vector<Tensor> caches, std::vector<Tensor> entries, Tensor positions);

void check_truncate(const std::vector<Tensor>& caches, const Tensor& lengths,
                    const Tensor& new_lengths, bool zero_fill);
void kv_truncate_(std::vector<Tensor> caches, Tensor lengths, Tensor new_lengths, bool zero_fill);

void check_compact(const std::vector<Tensor>& caches, const Tensor& base, const Tensor& path);
void kv_compact_(std::vector<Tensor> caches, Tensor base, Tensor path);

void check_paged_compact(const std::vector<Tensor>& caches, const Tensor& block_tables,
                         const Tensor& base, const Tensor& path);
void paged_compact_(std::vector<Tensor> caches, Tensor block_tables, Tensor base, Tensor path);

Extents check_paged_append(const std::vector<Tensor>& caches, const std::vector<Tensor>& entries,
                           const Tensor& block_tables, const Tensor& positions,
                           const std::optional<Tensor>& counts);
void paged_append_(std::vector<Tensor> caches, std::vector<Tensor> entries, Tensor block_tables,
                   Tensor positions, std::optional<Tensor> counts);

struct FreedBlocks {
  void* blocks;        // [B, M] contiguous, in the dtype of the block tables
  int32_t* num_freed;  // [B]
};
void check_paged_truncate(const Tensor& block_tables, const Tensor& lengths,
                          const Tensor& new_lengths, int64_t block_size);
void truncate_tables_(const Tensor& block_tables, const Tensor& lengths, Tensor new_lengths,
                      int64_t block_size, const FreedBlocks& out);

}  // namespace specdec
