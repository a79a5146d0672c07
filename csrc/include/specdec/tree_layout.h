#pragma once
// Ops on the shape of token trees: attention masks, reranking, prefix trees.
//
// A tree of N nodes is a list of parents: parents[n] is a node before n, or -1 for the root, the
// token that precedes the draft. Where rows or slots count N+1, the root comes first.
#include "specdec/ids.h"
#include "specdec/parallel.h"

namespace specdec {

// Parents are data and raise no error: a value outside [-1, n) counts as the root.
inline int64_t parent_of(const Ids& parents, int64_t b, int64_t n) {
  const int64_t parent = parents.at(b, n);
  return parent >= 0 && parent < n ? parent : -1;
}

// Each node sees the `lengths[b]` slots of the text, the root and its own ancestors.
struct TreeAttentionParams {
  Ids parents;             // [B, N]
  const int64_t* lengths;  // [B]
  bool* mask;              // [B, N+1, S]
  int64_t* positions;      // [B, N+1]
  int64_t batch;
  int64_t nodes;
  int64_t slots;   // S, key slots: the text, then the N+1 tokens of the tree
  int64_t window;  // a query sees that many positions up to its own; 0: no limit
};

// Keeps the best `size` of M candidates with their ancestors.
struct RerankTreeParams {
  Ids tokens;           // [B, M]
  Ids parents;          // [B, M]
  const float* scores;  // [B, M]
  int64_t score_stride_sequence, score_stride;
  IdsOut out_tokens;   // [B, size]
  IdsOut out_parents;  // [B, size]
  IdsOut nodes;        // [B, size], the candidates kept
  int64_t batch;
  int64_t candidates;
  int64_t size;
};

// Joins K token sequences, one branch each, into a tree.
struct BuildTrieParams {
  Ids sequences;       // [B, K, L], -1 ends a branch
  IdsOut tokens;       // [B, size]
  int32_t* parents;    // [B, size]
  int32_t* nodes;      // [B, K, L], the node of each token, -1 for none
  int32_t* num_nodes;  // [B]
  int64_t batch;
  int64_t branches;  // K
  int64_t length;    // L
  int64_t size;
  bool merge;  // branches share the nodes of a common prefix
};

namespace cpu {
void tree_attention(const TreeAttentionParams& p, const Parallel& parallel);
void rerank_tree(const RerankTreeParams& p, const Parallel& parallel);
void build_trie(const BuildTrieParams& p, const Parallel& parallel);
}  // namespace cpu

}  // namespace specdec
