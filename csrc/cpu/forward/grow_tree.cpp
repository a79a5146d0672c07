#include "specdec/grow_tree.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "specdec/expand_tree.h"
#include "specdec/tree_layout.h"

namespace specdec::cpu {
namespace {

class Growth {
 public:
  Growth(const GrowTreeParams& p, const Parallel& threads)
      : p_(p),
        threads_(threads),
        batch_(p.head.batch),
        width_(p.width),
        row_bytes_(p.head.hidden * (p.head.dtype == DType::kFloat32 ? 4 : 2)),
        limits_(p.limits, p.limits + batch_),
        roots_(batch_),
        deepest_(*std::max_element(limits_.begin(), limits_.end())),
        max_fed_(fed_nodes(deepest_, width_)),
        max_candidates_(candidates(deepest_, width_)),
        hidden_(batch_ * (1 + max_fed_) * row_bytes_),
        above_(batch_ * max_fed_),
        tokens_(batch_ * max_candidates_),
        parents_(batch_ * max_candidates_),
        scores_(batch_ * max_candidates_),
        depths_(max_candidates_),
        frontier_(batch_ * width_),
        came_from_(batch_ * width_, -1) {}

  void run() {
    feed_pairs();
    if (deepest_ > 0) expand(0, 1, std::vector<float>(batch_, 0.0f));
    while (depth_ < deepest_ && any_continues()) feed_level();
    keep_best();
  }

 private:
  char* hidden(int64_t b, int64_t row) {
    return hidden_.data() + (b * (1 + max_fed_) + row) * row_bytes_;
  }

  // The inputs of one forward of the head over `count` pairs of each sequence.
  struct Forward {
    int64_t count, slots;
    std::vector<char> x, residual, cos, sin, y;
    std::vector<int64_t> starts;
    std::vector<uint8_t> mask;
  };

  Forward forward(int64_t count, int64_t slots) const {
    const int64_t rows = batch_ * count;
    const int64_t angle_bytes = row_bytes_ / p_.head.hidden * p_.head.head_size;
    Forward f = {count, slots, {}, {}, {}, {}, {}, {}, {}};
    for (std::vector<char>* each : {&f.residual, &f.y}) each->resize(rows * row_bytes_);
    f.x.resize(2 * rows * row_bytes_);
    for (std::vector<char>* each : {&f.cos, &f.sin}) each->resize(rows * angle_bytes);
    f.starts.resize(batch_);
    f.mask.resize(rows * slots);
    return f;
  }

  // Sets pair i of sequence b.
  void set_pair(Forward& f, int64_t b, int64_t i, int64_t token, const char* hidden,
                int64_t place) const {
    const int64_t row = b * f.count + i;
    const int64_t angle_bytes = row_bytes_ / p_.head.hidden * p_.head.head_size;
    const auto* const embeddings = static_cast<const char*>(p_.embeddings);
    std::memcpy(&f.x[2 * row * row_bytes_], embeddings + token * row_bytes_, row_bytes_);
    std::memcpy(&f.x[(2 * row + 1) * row_bytes_], hidden, row_bytes_);
    std::memcpy(&f.residual[row * row_bytes_], hidden, row_bytes_);
    const int64_t from = place * angle_bytes, to = row * angle_bytes;
    std::memcpy(&f.cos[to], static_cast<const char*>(p_.cos) + from, angle_bytes);
    std::memcpy(&f.sin[to], static_cast<const char*>(p_.sin) + from, angle_bytes);
  }

  void run_head(Forward& f) const {
    DecoderLayersParams head = p_.head;
    head.x = f.x.data();
    head.residual = f.residual.data();
    head.cos = f.cos.data();
    head.sin = f.sin.data();
    head.positions = {f.starts.data(), true, 1};
    head.mask = f.mask.data();
    head.mask_stride_sequence = f.count * f.slots;
    head.mask_stride_token = f.slots;
    head.y = f.y.data();
    head.tokens = f.count;
    head.input = 2 * head.hidden;
    head.row_period = batch_ * f.count;
    head.slots = f.slots;
    decoder_layers(head, threads_);
  }

  // The pairs of committed tokens; the hidden state of the last one of each sequence is its root's.
  void feed_pairs() {
    const auto* const given = static_cast<const char*>(p_.hidden);
    const int64_t slots = *std::max_element(p_.starts, p_.starts + batch_) + p_.pairs;
    Forward f = forward(p_.pairs, slots);
    for (int64_t b = 0; b < batch_; ++b) {
      f.starts[b] = p_.starts[b];
      roots_[b] = p_.starts[b] + p_.counts[b] - 1;
      for (int64_t i = 0; i < p_.pairs; ++i) {
        const int64_t row = b * p_.pairs + i, place = p_.starts[b] + i;
        set_pair(f, b, i, p_.tokens.at(b, i), given + row * row_bytes_, place);
        std::memset(&f.mask[row * slots], 1, place + 1);
      }
    }
    run_head(f);
    for (int64_t b = 0; b < batch_; ++b) {
      const int64_t last = b * p_.pairs + p_.counts[b] - 1;
      std::memcpy(hidden(b, 0), &f.y[last * row_bytes_], row_bytes_);
    }
  }

  // Feeds the frontier, whose nodes follow those fed before, and expands it.
  void feed_level() {
    const int64_t fed = fed_nodes(depth_, width_);
    const int64_t slots = *std::max_element(roots_.begin(), roots_.end()) + 1 + fed + width_;
    Forward f = forward(width_, slots);
    std::vector<float> paths(batch_ * width_);
    for (int64_t b = 0; b < batch_; ++b) {
      f.starts[b] = roots_[b] + 1 + fed;
      for (int64_t k = 0; k < width_; ++k) {
        const int64_t row = b * width_ + k,
                      candidate = b * max_candidates_ + first_ + frontier_[row];
        const int64_t parent = above_[b * max_fed_ + fed + k] = came_from_[row];
        paths[row] = scores_[candidate];
        const int64_t token = std::max<int64_t>(tokens_[candidate], 0);
        set_pair(f, b, k, token, hidden(b, parent + 1), roots_[b] + depth_);
        uint8_t* const mask = &f.mask[row * slots];
        std::memset(mask, 1, roots_[b] + 1);
        for (int64_t n = fed + k; n >= 0; n = above_[b * max_fed_ + n]) mask[roots_[b] + 1 + n] = 1;
      }
    }
    run_head(f);
    for (int64_t b = 0; b < batch_; ++b) {
      std::memcpy(hidden(b, 1 + fed), &f.y[b * width_ * row_bytes_], width_ * row_bytes_);
    }
    expand(fed + 1, width_, paths);
    for (int64_t row = 0; row < batch_ * width_; ++row) {
      came_from_[row] = fed + frontier_[row] / width_;
    }
  }

  // The children of `count` nodes, whose hidden states are rows from `begin` on, as candidates.
  void expand(int64_t begin, int64_t count, const std::vector<float>& paths) {
    const int64_t rows = batch_ * count, vocab = p_.output.out_features;
    std::vector<char> normed(rows * row_bytes_), logits(rows * vocab * row_bytes_ / p_.head.hidden);
    for (int64_t b = 0; b < batch_; ++b) {
      rms_norm({hidden(b, begin), p_.norm, &normed[b * count * row_bytes_], p_.head.dtype, count,
                p_.head.hidden, p_.head.epsilon});
    }
    packed_linear({normed.data(), p_.output, logits.data(), p_.head.dtype, rows, p_.head.hidden},
                  threads_);
    std::vector<int64_t> tokens(rows * width_), frontier(batch_ * width_);
    std::vector<float> scores(rows * width_);
    ExpandTreeParams e = {};
    e.logits = {logits.data(), p_.head.dtype, count * vocab, vocab, {}};
    e.scores = paths.data();
    e.score_stride_sequence = count;
    e.score_stride = 1;
    e.temperature = 1.0f;
    e.tokens = tokens.data();
    e.out_scores = scores.data();
    e.frontier = frontier.data();
    e.batch = batch_;
    e.nodes = count;
    e.vocab = vocab;
    e.width = width_;
    expand_tree(e, threads_);

    const int64_t end = count_;
    count_ += count * width_;
    ++depth_;
    std::fill(depths_.begin() + end, depths_.begin() + count_, depth_);
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t i = 0; i < count * width_; ++i) {
        const int64_t from = b * count * width_ + i, to = b * max_candidates_ + end + i;
        const int64_t token = tokens[from];
        tokens_[to] = token < 0 || p_.draft_tokens == nullptr ? token : p_.draft_tokens[token];
        scores_[to] = scores[from];
        parents_[to] = depth_ == 1 ? -1 : first_ + frontier_[b * width_ + i / width_];
      }
    }
    first_ = end;
    frontier_.swap(frontier);
  }

  // Whether any sequence drafts another level; each has its own answer. A node is at most as likely
  // as its parent, so a level below `size` better candidates gives no nodes.
  bool any_continues() {
    bool any = false;
    std::vector<float> best;
    for (int64_t b = 0; b < batch_; ++b) {
      if (limits_[b] <= depth_) continue;
      const float* const scores = &scores_[b * max_candidates_];
      float total = 0, highest = -INFINITY;
      for (int64_t k = 0; k < width_; ++k) {
        const float path = scores[first_ + frontier_[b * width_ + k]];
        total += std::exp(path);
        highest = std::max(highest, path);
      }
      bool continues = total >= p_.min_probability;
      if (continues && count_ >= p_.size) {
        best.assign(scores, scores + count_);
        std::nth_element(best.begin(), best.begin() + (p_.size - 1), best.end(),
                         [](float a, float c) { return a > c; });
        continues = highest > best[p_.size - 1];
      }
      if (!continues) limits_[b] = depth_;
      any |= continues;
    }
    return any;
  }

  void keep_best() {
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t i = 0; i < count_; ++i) {
        if (depths_[i] > limits_[b]) tokens_[b * max_candidates_ + i] = -1;
      }
      p_.levels[b] = std::clamp<int64_t>(limits_[b], 0, depth_);
    }
    std::vector<int64_t> nodes(batch_ * p_.size);
    rerank_tree({{tokens_.data(), true, max_candidates_, 0, 1},
                 {parents_.data(), true, max_candidates_, 0, 1},
                 scores_.data(),
                 max_candidates_,
                 1,
                 {p_.out_tokens, true},
                 {p_.out_parents, true},
                 {nodes.data(), true},
                 batch_,
                 count_,
                 p_.size},
                threads_);
    for (int64_t i = 0; i < batch_ * p_.size; ++i) {
      const int64_t b = i / p_.size;
      p_.out_scores[i] = nodes[i] < 0 ? -INFINITY : scores_[b * max_candidates_ + nodes[i]];
    }
  }

  const GrowTreeParams& p_;
  const Parallel& threads_;
  int64_t batch_, width_, row_bytes_;
  std::vector<int64_t> limits_, roots_;         // the slot and place of each sequence's root
  int64_t deepest_, max_fed_, max_candidates_;  // levels, nodes that are fed, candidates
  std::vector<char> hidden_;    // of the root and of the nodes fed, [batch, 1 + nodes, hidden]
  std::vector<int64_t> above_;  // the node that each node fed hangs below, -1: the root
  std::vector<int64_t> tokens_, parents_;  // [batch, most] of candidates
  std::vector<float> scores_;
  std::vector<int64_t> depths_;
  // Which candidates of the last level are expanded next, and the node fed above each of them.
  std::vector<int64_t> frontier_, came_from_;
  int64_t count_ = 0, first_ = 0, depth_ = 0;  // candidates, those before the last level, levels
};

}  // namespace

void grow_tree(const GrowTreeParams& p, const Parallel& threads) {
  if (p.head.batch > 0) Growth(p, threads).run();
}

}  // namespace specdec::cpu
