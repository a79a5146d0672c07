#pragma once
// The draft tree of one sequence. Terms used in this directory:
//   node        one drafted token; its number is its place in draft_token_ids
//   root        the text before the draft (kRoot); its children are the first drafted tokens
//   child       a node whose parent is the given node or the root; children of one parent are
//               siblings, in the order of their numbers
//   path        nodes from a child of the root downwards; verification accepts one path
//   depth       number of nodes on the path so far; the token at depth d follows d accepted nodes
//   trial       the acceptance test of one sibling; trial 0 is the first sibling tested
//   residual    the target distribution P less the draft distributions Q of rejected siblings,
//               clipped at zero and normalised
//   recovered token   emitted once every child was rejected; rules that read Q draw it from the
//                     residual
//   bonus token       emitted after a path whose last node has no children
#include <cstdint>
#include <vector>

namespace specdec::cpu {

constexpr int64_t kRoot = -1, kNone = -1;

// The nodes that take part in verification, as linked lists of siblings. Absent nodes (token -1)
// and invalid ones belong to no list.
struct Nodes {
  std::vector<int64_t> tokens;         // [N]
  std::vector<int64_t> parents;        // [N]
  std::vector<int64_t> first_of;       // [N+1], entry n+1: the first child of node n
  std::vector<int64_t> next_siblings;  // [N]

  int64_t first_child(int64_t node) const { return first_of[node + 1]; }

  void clear(int64_t n) {
    tokens.assign(n, kNone);
    parents.assign(n, kNone);
    next_siblings.assign(n, kNone);
    first_of.assign(n + 1, kNone);
  }
  // Nodes are added in descending order, so that lists of siblings ascend.
  void add(int64_t n, int64_t token, int64_t parent) {
    tokens[n] = token;
    parents[n] = parent;
    next_siblings[n] = first_of[parent + 1];
    first_of[parent + 1] = n;
  }
};

}  // namespace specdec::cpu
