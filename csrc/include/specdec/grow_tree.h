#pragma once
// A draft tree of EAGLE-2, grown by a head of EAGLE-3: the head reads pairs of a token and a hidden
// state, each level of the tree is one forward of it over the frontier, and the best of all
// candidates are kept.
#include "specdec/decoder_layer.h"
#include "specdec/ids.h"

namespace specdec {

struct GrowTreeParams {
  // The head's layers, caches, sizes and scale; the inputs and outputs of a forward are not set.
  DecoderLayersParams head;
  const void* embeddings;  // [vocab, hidden]
  const void* norm;        // [hidden], before `output`
  PackedWeight output;     // hidden to the draft vocabulary
  const int64_t*
      draft_tokens;       // [draft vocabulary], the token of each; null where it is its number
  const void *cos, *sin;  // [places, head_size]
  const void* hidden;     // [batch, pairs, hidden]
  Ids tokens;             // [batch, pairs], in the vocabulary
  const int64_t* counts;  // [batch], pairs of each sequence, at least 1
  const int64_t* starts;  // [batch], slot and place of the first pair
  const int64_t* limits;  // [batch], deepest level of each sequence
  int64_t pairs;
  int64_t width;  // nodes that a level expands, and children of each
  int64_t size;   // nodes that are kept
  // A level is not drafted where all nodes that it would expand have less probability together.
  float min_probability;
  int64_t* out_tokens;   // [batch, size], -1: no node
  int64_t* out_parents;  // [batch, size]
  float* out_scores;     // [batch, size], log-probability of the path, -inf: no node
  int64_t* levels;       // [batch], the levels that were drafted
};

// Cache slots and places that the nodes of a tree so deep take beyond those of the pairs.
inline int64_t fed_nodes(int64_t depth, int64_t width) {
  return depth > 1 ? (depth - 1) * width : 0;
}
inline int64_t candidates(int64_t depth, int64_t width) {
  return depth > 0 ? width + fed_nodes(depth, width) * width : 0;
}

namespace cpu {
void grow_tree(const GrowTreeParams& p, const Parallel& threads);
}  // namespace cpu

}  // namespace specdec
