#pragma once
// The draft tree of one sequence. specdec/tree.h defines the terms.
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
