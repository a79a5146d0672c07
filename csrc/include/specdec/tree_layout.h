#pragma once
// Token trees as parents: who sees whom, the best nodes of a tree, prefix trees.
#include <cstdint>

#include "specdec/parallel.h"

namespace specdec {

// int32 or int64 numbers in any layout: [B, N] (outer is 0 then) or [B, K, L].
struct Ids {
  const void* data;
  bool wide;  // int64
  int64_t stride_sequence, stride_outer, stride_inner;

  int64_t at(int64_t b, int64_t outer, int64_t inner) const {
    const int64_t i = b * stride_sequence + outer * stride_outer + inner * stride_inner;
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  int64_t at(int64_t b, int64_t n) const { return at(b, 0, n); }
};

// The same to write, contiguous.
struct IdsOut {
  void* data;
  bool wide;

  void set(int64_t i, int64_t value) const {
    if (wide) {
      static_cast<int64_t*>(data)[i] = value;
    } else {
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
    }
  }
};

// The parent of node n, -1 for the root: what lies outside [-1, n) is data and counts as -1.
inline int64_t parent_of(const Ids& parents, int64_t b, int64_t n) {
  const int64_t parent = parents.at(b, n);
  return parent >= 0 && parent < n ? parent : -1;
}

struct TreeAttentionParams {
  Ids parents;             // [B, N]
  const int64_t* lengths;  // [B]
  bool* mask;              // [B, N+1, S]
  int64_t* positions;      // [B, N+1]
  int64_t batch;
  int64_t nodes;
  int64_t slots;
  int64_t window;  // 0: every key
};

struct RerankTreeParams {
  Ids tokens;           // [B, M]
  Ids parents;          // [B, M]
  const float* scores;  // [B, M]
  int64_t score_stride_sequence, score_stride;
  IdsOut out_tokens;   // [B, size]
  IdsOut out_parents;  // [B, size]
  IdsOut nodes;        // [B, size], among the candidates
  int64_t batch;
  int64_t candidates;
  int64_t size;
};

struct BuildTrieParams {
  Ids sequences;       // [B, K, L]
  IdsOut tokens;       // [B, size]
  int32_t* parents;    // [B, size]
  int32_t* nodes;      // [B, K, L]
  int32_t* num_nodes;  // [B]
  int64_t batch;
  int64_t branches;  // K
  int64_t length;    // L
  int64_t size;
  bool merge;  // one node for what has one prefix
};

namespace cpu {
void tree_attention(const TreeAttentionParams& p, const Parallel& parallel);
void rerank_tree(const RerankTreeParams& p, const Parallel& parallel);
void build_trie(const BuildTrieParams& p, const Parallel& parallel);
}  // namespace cpu

}  // namespace specdec
