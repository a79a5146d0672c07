#include "specdec/expand_tree.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>
#include <vector>

#include "cpu/each_sequence.h"
#include "cpu/row/distribution.h"
#include "specdec/ordered_key.h"

namespace specdec::cpu {
namespace {

// The largest logits of a row with their tokens, in descending order; ties go to the lower token.
class TopTokens {
 public:
  explicit TopTokens(int64_t width) : width_(width) {
    std::fill_n(values_, width, -INFINITY);
    std::fill_n(tokens_, width, -1);
  }

  // Only larger values can still enter.
  float floor() const { return values_[width_ - 1]; }

  // Tokens must be inserted in ascending order, so that ties keep the lower one.
  void insert(float value, int64_t token) {
    int64_t j = width_ - 1;
    for (; j > 0 && values_[j - 1] < value; --j) {
      values_[j] = values_[j - 1];
      tokens_[j] = tokens_[j - 1];
    }
    values_[j] = value;
    tokens_[j] = token;
  }

  float value(int64_t j) const { return values_[j]; }
  int64_t token(int64_t j) const { return tokens_[j]; }

 private:
  int64_t width_;
  float values_[kMaxWidth];
  int64_t tokens_[kMaxWidth];
};

struct RowScratch {
  std::vector<float> maxima;        // [tiles]
  std::vector<float> sums;          // [tiles], of exp relative to each tile's maximum
  std::vector<float> strip_maxima;  // [V / kStrip]
};

void read_row(const RowView& row, float inv_t, const Parallel& parallel, RowScratch& scratch) {
  const TileKernels& k = tile_kernels();
  scratch.maxima.resize(row.tiles());
  scratch.sums.resize(row.tiles());
  scratch.strip_maxima.resize((row.vocab() + kStrip - 1) / kStrip);
  parallel(row.tiles(), [&](int64_t begin, int64_t end) {
    float buffer[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const float* tile = row.tile(t, buffer);
      const int64_t n = row.tile_size(t);
      const Peak peak = k.peak(tile, n, scratch.strip_maxima.data() + t * (kTile / kStrip));
      scratch.maxima[t] = peak.nan ? NAN : peak.max;
      scratch.sums[t] =
          std::isfinite(peak.max) ? k.sum_exp(tile, n, {peak.max, inv_t, -INFINITY, 1.0f}) : 0.0f;
    }
  });
}

// The row maximum; -inf if the row holds NaN or +inf, or nothing finite.
float finite_max(const std::vector<float>& maxima) {
  float max = -INFINITY;
  for (float m : maxima) {
    if (!(m < INFINITY)) return -INFINITY;
    max = std::max(max, m);
  }
  return max;
}

double log_sum(const RowScratch& scratch, float max, double temperature) {
  double total = 0;
  for (size_t t = 0; t < scratch.sums.size(); ++t) {
    if (scratch.sums[t] == 0) continue;
    const double gap = (static_cast<double>(scratch.maxima[t]) - max) / temperature;
    total += static_cast<double>(scratch.sums[t]) * std::exp(gap);
  }
  return std::log(total);
}

// A logit that at least `width` strip maxima reach, and not many more. No smaller logit can be
// among the `width` largest of the row.
float top_floor(const std::vector<float>& strip_maxima, int64_t width, float max) {
  const auto n = static_cast<int64_t>(strip_maxima.size());
  if (n < width) return -INFINITY;
  float floor = -INFINITY;
  uint32_t low = ordered_key(-FLT_MAX), high = ordered_key(max);
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const int64_t reached = tile_kernels().count(strip_maxima.data(), n, from_ordered_key(middle));
    if (reached < width) {
      high = middle - 1;
      continue;
    }
    low = middle;
    floor = from_ordered_key(middle);
    if (reached <= 2 * width) break;
  }
  return floor;
}

// Reads only those strips again that may hold one of the largest logits.
void find_top(const RowView& row, const RowScratch& scratch, float floor, TopTokens& top) {
  for (int64_t i = 0; i < static_cast<int64_t>(scratch.strip_maxima.size()); ++i) {
    if (!(scratch.strip_maxima[i] >= floor && scratch.strip_maxima[i] > top.floor())) continue;
    const int64_t begin = i * kStrip, n = std::min(kStrip, row.vocab() - begin);
    float buffer[kStrip], values[kStrip];
    int32_t tokens[kStrip];
    const int64_t count = tile_kernels().gather(row.read(begin, n, buffer), n, begin,
                                                std::max(floor, top.floor()), values, tokens);
    for (int64_t j = 0; j < count; ++j) {
      if (values[j] > top.floor()) top.insert(values[j], tokens[j]);
    }
  }
}

void expand_node(const ExpandTreeParams& p, int64_t r, const Parallel& parallel,
                 RowScratch& scratch) {
  const int64_t b = r / p.nodes, node = r % p.nodes;
  int64_t* tokens = p.tokens + r * p.width;
  float* scores = p.out_scores + r * p.width;
  std::fill_n(tokens, p.width, -1);
  std::fill_n(scores, p.width, -INFINITY);
  const float score = p.scores[b * p.score_stride_sequence + node * p.score_stride];
  float temperature = p.temperatures != nullptr ? p.temperatures[b] : p.temperature;
  if (!std::isfinite(score) || !std::isfinite(temperature) || temperature < 0) return;
  if (temperature == 0) temperature = 1;

  const RowView row(p.logits, b, node, p.vocab);
  read_row(row, inverse_temperature(temperature), parallel, scratch);
  const float max = finite_max(scratch.maxima);
  if (max == -INFINITY) return;
  const double total = log_sum(scratch, max, temperature);
  TopTokens top(p.width);
  find_top(row, scratch, top_floor(scratch.strip_maxima, p.width, max), top);
  for (int64_t j = 0; j < p.width && top.token(j) >= 0; ++j) {
    const double gap = (static_cast<double>(top.value(j)) - max) / temperature;
    const auto child = static_cast<float>(score + (gap - total));
    if (child == -INFINITY) return;
    tokens[j] = top.token(j);
    scores[j] = child;
  }
}

void choose_frontier(const ExpandTreeParams& p, int64_t b, std::vector<int64_t>& order) {
  const float* scores = p.out_scores + b * p.nodes * p.width;
  order.resize(p.nodes * p.width);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + p.width, order.end(), [&](int64_t i, int64_t j) {
    return scores[i] != scores[j] ? scores[i] > scores[j] : i < j;
  });
  std::copy_n(order.begin(), p.width, p.frontier + b * p.width);
}

}  // namespace

void expand_tree(const ExpandTreeParams& p, const Parallel& parallel) {
  const int64_t rows = p.batch * p.nodes;
  each_sequence<RowScratch>(parallel, rows, rows * p.vocab,
                            [&](int64_t r, const Parallel& inner, RowScratch& scratch) {
                              expand_node(p, r, inner, scratch);
                            });
  std::vector<int64_t> order;
  for (int64_t b = 0; b < p.batch; ++b) choose_frontier(p, b, order);
}

}  // namespace specdec::cpu
