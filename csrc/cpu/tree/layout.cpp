#include <algorithm>
#include <cmath>
#include <vector>

#include "specdec/tree_layout.h"

namespace specdec::cpu {
namespace {

// For fewer bytes, waking a thread costs more than it saves.
bool worth_threads(int64_t bytes) { return bytes >= 256 * 1024; }

// The candidates of one sequence and their scores.
class Ranking {
 public:
  // A node is ranked by the smallest score on its path, so no node ranks above its parent. Nodes
  // whose score is NaN or -inf are never kept.
  void read(const RerankTreeParams& p, int64_t b) {
    score_.resize(p.candidates);
    parent_.resize(p.candidates);
    order_.clear();
    for (int64_t m = 0; m < p.candidates; ++m) {
      const int64_t parent = parent_[m] = parent_of(p.parents, b, m);
      float score = p.scores[b * p.score_stride_sequence + m * p.score_stride];
      if (parent >= 0) score = std::min(score, score_[parent]);
      const bool present = p.tokens.at(b, m) >= 0 && score > -INFINITY;
      score_[m] = present ? score : -INFINITY;
      if (present) order_.push_back(m);
    }
  }

  // The best `size` candidates in ascending order. Ties go to the lower number, which is the
  // parent where a child ties with it.
  const std::vector<int64_t>& best(int64_t size) {
    if (size < static_cast<int64_t>(order_.size())) {
      std::nth_element(order_.begin(), order_.begin() + size, order_.end(),
                       [&](int64_t a, int64_t b) {
                         return score_[a] != score_[b] ? score_[a] > score_[b] : a < b;
                       });
      order_.resize(size);
      std::sort(order_.begin(), order_.end());
    }
    return order_;
  }

  int64_t parent(int64_t m) const { return parent_[m]; }

 private:
  std::vector<float> score_;
  std::vector<int64_t> parent_, order_;
};

// One prefix tree under construction, with the children of each node as a linked list.
class Trie {
 public:
  Trie(const BuildTrieParams& p, int64_t b)
      : p_(p),
        b_(b),
        capacity_(std::min(p.size, p.branches * p.length)),
        first_child_(capacity_ + 1, -1),
        next_sibling_(capacity_, -1) {}

  int32_t count() const { return count_; }

  // Finds or adds the child of `parent` (-1: the root) with this token; -1 if the tree is full.
  int32_t child(int32_t parent, int64_t token) {
    if (p_.merge) {
      for (int32_t n = first_child_[parent + 1]; n >= 0; n = next_sibling_[n]) {
        if (tokens_[n] == token) return n;
      }
    }
    if (count_ == capacity_) return -1;
    p_.tokens.set(b_ * p_.size + count_, token);
    p_.parents[b_ * p_.size + count_] = parent;
    tokens_.push_back(token);
    next_sibling_[count_] = first_child_[parent + 1];
    first_child_[parent + 1] = count_;
    return count_++;
  }

 private:
  const BuildTrieParams& p_;
  int64_t b_, capacity_;
  std::vector<int64_t> tokens_;
  std::vector<int32_t> first_child_, next_sibling_;  // entry parent + 1, entry n
  int32_t count_ = 0;
};

void build_one(const BuildTrieParams& p, int64_t b) {
  Trie trie(p, b);
  int32_t* nodes = p.nodes + b * p.branches * p.length;
  std::fill_n(nodes, p.branches * p.length, -1);
  for (int64_t k = 0; k < p.branches; ++k) {
    int32_t node = -1;
    for (int64_t l = 0; l < p.length; ++l) {
      const int64_t token = p.sequences.at(b, k, l);
      if (token < 0) break;
      node = trie.child(node, token);
      if (node < 0) break;
      nodes[k * p.length + l] = node;
    }
  }
  p.num_nodes[b] = trie.count();
  for (int64_t n = trie.count(); n < p.size; ++n) {
    p.tokens.set(b * p.size + n, -1);
    p.parents[b * p.size + n] = -1;
  }
}

}  // namespace

void tree_attention(const TreeAttentionParams& p, const Parallel& parallel) {
  const int64_t rows = p.nodes + 1;
  const Parallel threads = worth_threads(p.batch * rows * p.slots) ? parallel : serial();
  threads(p.batch * rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t b = r / rows, node = r % rows - 1;
      // Clamped so that no sum below can overflow.
      const int64_t length = std::clamp<int64_t>(p.lengths[b], 0, int64_t{1} << 62);
      int64_t depth = 0;
      for (int64_t n = node; n >= 0; n = parent_of(p.parents, b, n)) ++depth;
      p.positions[r] = length + depth;
      // Keys at positions below `first` lie outside the window.
      const int64_t first = p.window > 0 ? length + depth - p.window + 1 : 0;
      bool* row = p.mask + r * p.slots;
      const int64_t prefix = std::min(length, p.slots);
      const int64_t hidden = std::clamp<int64_t>(first, 0, prefix);
      std::fill_n(row, hidden, false);
      std::fill_n(row + hidden, prefix - hidden, true);
      std::fill_n(row + prefix, p.slots - prefix, false);
      int64_t position = length + depth;
      for (int64_t n = node; position >= std::max(first, length); --position) {
        if (length + 1 + n < p.slots) row[length + 1 + n] = true;
        if (n >= 0) n = parent_of(p.parents, b, n);
      }
    }
  });
}

void rerank_tree(const RerankTreeParams& p, const Parallel& parallel) {
  const Parallel threads = worth_threads(p.batch * p.candidates * 16) ? parallel : serial();
  threads(p.batch, [&](int64_t begin, int64_t end) {
    Ranking ranking;
    std::vector<int64_t> renumbered(p.candidates);
    for (int64_t b = begin; b < end; ++b) {
      ranking.read(p, b);
      int64_t out = b * p.size;
      for (int64_t m : ranking.best(p.size)) {
        const int64_t parent = ranking.parent(m);
        renumbered[m] = out - b * p.size;
        p.out_tokens.set(out, p.tokens.at(b, m));
        p.out_parents.set(out, parent < 0 ? -1 : renumbered[parent]);
        p.nodes.set(out, m);
        ++out;
      }
      for (; out < (b + 1) * p.size; ++out) {
        p.out_tokens.set(out, -1);
        p.out_parents.set(out, -1);
        p.nodes.set(out, -1);
      }
    }
  });
}

void build_trie(const BuildTrieParams& p, const Parallel& parallel) {
  const Parallel threads =
      worth_threads(p.batch * p.branches * p.length * 16) ? parallel : serial();
  threads(p.batch, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) build_one(p, b);
  });
}

}  // namespace specdec::cpu
