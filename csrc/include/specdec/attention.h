#pragma once
// Attention of a few queries over the keys and values of a static cache, in place.
//
// The bits of a query's output follow from that query and from the keys and values that it sees, in
// the order of their slots. The ordinal of a key is its place among them.
#include "specdec/parallel.h"
#include "specdec/sampling.h"

namespace specdec {

// Elements from one to the next; the last dimension is contiguous.
struct AttentionStrides {
  int64_t sequence, head, token;
};

struct CachedAttentionParams {
  const void* query;    // [B, H, n, D]
  const void* keys;     // [B, H_kv, S, D]
  const void* values;   // [B, H_kv, S, D_v]
  const uint8_t* mask;  // [B, n, S], contiguous in S, may be null
  void* out;            // [B, n, H, D_v]
  DType dtype;          // of all but the mask
  int64_t batch, heads, kv_heads, queries, slots, size, value_size;
  AttentionStrides query_strides, key_strides, value_strides;
  int64_t mask_stride_sequence, mask_stride_query;
  float scale;
  float soft_cap;  // 0: none
};

namespace cpu {
void cached_attention(const CachedAttentionParams& p, const Parallel& threads);
}  // namespace cpu

}  // namespace specdec
