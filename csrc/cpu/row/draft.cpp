#include "cpu/row/draft.h"

#include <algorithm>
#include <atomic>
#include <cmath>

namespace specdec::cpu {
namespace {

bool is_probability(float value) { return value >= 0 && std::isfinite(value); }

bool valid(const DraftDistribution& d, const float* values, int64_t n) {
  if (d.probs) return tile_kernels().is_distribution(values, n);
  const Peak peak = tile_kernels().peak(values, n, nullptr);
  return !peak.nan && peak.max < INFINITY;
}

}  // namespace

bool contains(const std::vector<int64_t>& tokens, int64_t x) {
  return std::find(tokens.begin(), tokens.end(), x) != tokens.end();
}

void zero_out(const std::vector<int64_t>& tokens, int64_t begin, int64_t n, float* out) {
  for (int64_t x : tokens) {
    if (x >= begin && x < begin + n) out[x - begin] = 0;
  }
}

void DraftDistribution::look_up(int64_t x) {
  invalid_at_token = row_invalid;
  if (lists_tokens()) {
    q_x = form == DraftForm::kSparse ? mass(x) : x == token;
    log_q_x = std::log(q_x);
    return;
  }
  if (row_invalid) return;
  const int64_t column = columns != nullptr ? columns[x] : x;
  const bool inside = column >= 0 && column < row.vocab();
  const float at = inside ? row.at(column) : 0;
  if (probs) {
    invalid_at_token = inside && !is_probability(at);
    q_x = at + 0.0f;  // -0 becomes 0: P / -0 would be -inf
    log_q_x = std::log(q_x);
  } else {
    invalid_at_token = inside && !(at < INFINITY);
    log_q_x = inside ? stats.logprob(row, column) : -INFINITY;
    q_x = std::exp(log_q_x);
  }
}

double DraftDistribution::mass(int64_t token) const {
  double sum = 0;
  for (int64_t k = 0; k < row.vocab(); ++k) {
    if (id(k) == token) sum += static_cast<double>(row.at(k));
  }
  return sum;
}

bool DraftDistribution::weights(int64_t begin, int64_t n, float* out) const {
  if (lists_tokens()) {
    std::fill(out, out + n, 0.0f);
    if (form == DraftForm::kOneHot) {
      if (token >= begin && token < begin + n) out[token - begin] = 1;
      return true;
    }
    for (int64_t k = 0; k < row.vocab(); ++k) {
      if (id(k) >= begin && id(k) < begin + n) out[id(k) - begin] += row.at(k);
    }
    return true;
  }
  if (columns != nullptr) {
    row.gather(columns + begin, n, probs ? 0.0f : -INFINITY, out);
    if (!probs) tile_kernels().weights(out, n, weight_params, out);
    return true;  // `add_mass_beyond` checks the row
  }
  const int64_t in_row = std::clamp<int64_t>(row.vocab() - begin, 0, n);
  std::fill(out + in_row, out + n, 0.0f);
  if (in_row == 0) return true;
  float buffer[kTile];
  const float* values = row.read(begin, in_row, buffer);
  if (!row_checked && !valid(*this, values, in_row)) return false;
  if (probs) {
    std::copy(values, values + in_row, out);
  } else {
    tile_kernels().weights(values, in_row, weight_params, out);
  }
  return true;
}

bool DraftDistribution::whole_row_valid(const Parallel& parallel) const {
  if (lists_tokens() || row_checked) return true;
  std::atomic<bool> all{true};
  parallel(row.tiles(), [&](int64_t begin, int64_t end) {
    float buffer[kTile];
    for (int64_t t = begin; t < end && all; ++t) {
      if (!valid(*this, row.tile(t, buffer), row.tile_size(t))) all = false;
    }
  });
  return all;
}

void DraftDistribution::weights_of(const int32_t* ids, int64_t n, float* out) const {
  if (lists_tokens()) {
    for (int64_t j = 0; j < n; ++j) {
      out[j] = form == DraftForm::kSparse ? static_cast<float>(mass(ids[j])) : ids[j] == token;
    }
    return;
  }
  int32_t mapped[kTile];
  if (columns != nullptr) {
    for (int64_t j = 0; j < n; ++j) mapped[j] = columns[ids[j]];
    ids = mapped;
  }
  row.gather(ids, n, probs ? 0.0f : -INFINITY, out);
  if (!probs) tile_kernels().weights(out, n, weight_params, out);
}

bool DraftDistribution::add_mass_beyond(int64_t vocab, double& mass_beyond,
                                        const std::vector<int64_t>& without) const {
  if (form == DraftForm::kOneHot) {
    if (token >= vocab && !contains(without, token)) mass_beyond += 1;
    return true;
  }
  if (form == DraftForm::kSparse) {
    for (int64_t k = 0; k < row.vocab(); ++k) {
      if (id(k) >= vocab && !contains(without, id(k)))
        mass_beyond += static_cast<double>(row.at(k));
    }
    return true;
  }
  if (row_checked && columns != nullptr) return true;
  float buffer[kTile], weights[kTile];
  for (int64_t begin = columns != nullptr ? 0 : vocab; begin < row.vocab(); begin += kTile) {
    const int64_t n = std::min(kTile, row.vocab() - begin);
    const float* values = row.read(begin, n, buffer);
    if (!row_checked && !valid(*this, values, n)) return false;
    if (columns != nullptr) continue;
    if (probs) {
      std::copy(values, values + n, weights);
    } else {
      tile_kernels().weights(values, n, weight_params, weights);
    }
    zero_out(without, begin, n, weights);
    mass_beyond += static_cast<double>(tile_kernels().sum(weights, n));
  }
  return true;
}

DraftDistribution draft_distribution(const DraftParams& source, int64_t b, int64_t row,
                                     int64_t statistic, int64_t x, float temperature,
                                     const Parallel& parallel, Scratch& scratch) {
  DraftDistribution d;
  d.token = x;
  if (source.form == DraftForm::kOneHot || temperature == 0) return d;
  d.form = source.form;
  if (row < 0 || row >= source.num_rows) {  // the index of the row may be data
    d.invalid_at_token = d.row_invalid = true;
    return d;
  }
  d.row = RowView(source.rows, source.flat ? 0 : b, row, source.vocab);
  d.columns = source.columns;
  d.ids_are_int64 = source.ids_are_int64;
  if (d.form == DraftForm::kSparse) {
    d.probs = true;
    const int64_t at = source.place(b, row);
    d.ids = static_cast<const char*>(source.ids) + at * source.vocab * (d.ids_are_int64 ? 8 : 4);
    for (int64_t k = 0; k < d.row.vocab(); ++k) {
      d.row_invalid |= d.id(k) >= 0 && !is_probability(d.row.at(k));
    }
    d.look_up(x);
    return d;
  }
  RowStats& stats = d.stats;
  if (d.form == DraftForm::kSampled) {
    set_sampled_stats(source, statistic, temperature, stats);
    d.row_invalid = !stats.valid;
    d.weight_params = stats.weight_params();
  } else if (source.kind == Kind::kProbs) {
    d.probs = true;
  } else {
    stats = measure(d.row, {temperature, 0, 1.0f, 0.0f}, parallel, scratch);
    d.row_invalid = !stats.valid;
    d.row_checked = stats.valid;
    if (stats.valid) d.weight_params = stats.weight_params();
  }
  d.look_up(x);
  return d;
}

}  // namespace specdec::cpu
