#pragma once
// Attention of a few queries. One source is built once per instruction set.
//
// A row is one head of one query. Rows are ordered by sequence, head of keys, query, and head of
// the group, so that a range of them reads keys and values once for all of its rows in a group.
#include <cstddef>
#include <cstdint>

#include "specdec/attention.h"

namespace specdec::cpu {

struct AttentionKernels {
  // Floats that `attend` needs.
  int64_t (*scratch_size)(const CachedAttentionParams& p);
  // Writes the outputs of rows [begin, end), by dtype.
  void (*attend[3])(const CachedAttentionParams& p, float* scratch, int64_t begin, int64_t end);
};

}  // namespace specdec::cpu
