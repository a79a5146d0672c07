#pragma once
// Attention over a cache, for its own op and for that of a whole decoder layer.
#include <optional>

#include "arguments/checks.h"
#include "specdec/attention.h"

namespace specdec {

void check_cached_attention(const Tensor& query, const Tensor& keys, const Tensor& values,
                            const std::optional<Tensor>& mask, const std::optional<double>& scale,
                            const std::optional<double>& soft_cap);
// The arguments have been checked, and out is [B, n, H, D_v].
void run_cached_attention(const Tensor& query, const Tensor& keys, const Tensor& values,
                          std::optional<Tensor> mask, const std::optional<double>& scale,
                          const std::optional<double>& soft_cap, const Tensor& out);

}  // namespace specdec
