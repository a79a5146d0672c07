#include "cpu/row/draft.h"

#include <algorithm>
#include <atomic>
#include <cmath>

namespace specdec::cpu {
namespace {

bool probability(float value) { return value >= 0 && std::isfinite(value); }

bool valid(const DraftDistribution& d, const float* values, int64_t n) {
  if (d.probs) return tile_kernels().is_distribution(values, n);
  const Peak peak = tile_kernels().peak(values, n, nullptr);
  return !peak.nan && peak.max < INFINITY;
}

}  // namespace

bool holds(const std::vector<int64_t>& tokens, int64_t x) {
  return std::find(tokens.begin(), tokens.end(), x) != tokens.end();
}

void clear(const std::vector<int64_t>& tokens, int64_t begin, int64_t n, float* out) {
  for (int64_t x : tokens) {
    if (x >= begin && x < begin + n) out[x - begin] = 0;
  }
}

void DraftDistribution::look_up(int64_t x) {
  fault = broken;
  if (few()) {
    q_x = form == DraftForm::kSparse ? mass(x) : x == token;
    log_q_x = std::log(q_x);
    return;
  }
  if (broken) return;
  const int64_t column = columns != nullptr ? columns[x] : x;
  const bool inside = column >= 0 && column < row.vocab();
  const float at = inside ? row.at(column) : 0;
  if (probs) {
    fault = inside && !probability(at);
    q_x = at;
    log_q_x = std::log(q_x);
  } else {
    fault = inside && !(at < INFINITY);
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
  if (few()) {
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
    return true;  // `rest` checks the row
  }
  const int64_t known = std::clamp<int64_t>(row.vocab() - begin, 0, n);
  std::fill(out + known, out + n, 0.0f);
  if (known == 0) return true;
  float buffer[kTile];
  const float* values = row.read(begin, known, buffer);
  if (!checked && !valid(*this, values, known)) return false;
  if (probs) {
    std::copy(values, values + known, out);
  } else {
    tile_kernels().weights(values, known, weight_params, out);
  }
  return true;
}

bool DraftDistribution::whole_row_valid(const Parallel& parallel) const {
  if (few() || checked) return true;
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
  if (few()) {
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

bool DraftDistribution::rest(int64_t vocab, double& beyond,
                             const std::vector<int64_t>& without) const {
  if (form == DraftForm::kOneHot) {
    if (token >= vocab && !holds(without, token)) beyond += 1;
    return true;
  }
  if (form == DraftForm::kSparse) {
    for (int64_t k = 0; k < row.vocab(); ++k) {
      if (id(k) >= vocab && !holds(without, id(k))) beyond += static_cast<double>(row.at(k));
    }
    return true;
  }
  if (checked && columns != nullptr) return true;
  float buffer[kTile], weights[kTile];
  for (int64_t begin = columns != nullptr ? 0 : vocab; begin < row.vocab(); begin += kTile) {
    const int64_t n = std::min(kTile, row.vocab() - begin);
    const float* values = row.read(begin, n, buffer);
    if (!checked && !valid(*this, values, n)) return false;
    if (columns != nullptr) continue;
    if (probs) {
      std::copy(values, values + n, weights);
    } else {
      tile_kernels().weights(values, n, weight_params, weights);
    }
    clear(without, begin, n, weights);
    beyond += static_cast<double>(tile_kernels().sum(weights, n));
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
    d.fault = d.broken = true;
    return d;
  }
  d.row = RowView(source.rows, source.flat ? 0 : b, row, source.vocab);
  d.columns = source.columns;
  d.ids_are_int64 = source.ids_are_int64;
  if (d.form == DraftForm::kSparse) {
    d.probs = true;
    const int64_t at = source.flat ? row : b * source.num_rows + row;
    d.ids = static_cast<const char*>(source.ids) + at * source.vocab * (d.ids_are_int64 ? 8 : 4);
    for (int64_t k = 0; k < d.row.vocab(); ++k) {
      d.broken |= d.id(k) >= 0 && !probability(d.row.at(k));
    }
    d.look_up(x);
    return d;
  }
  RowStats& stats = d.stats;
  if (d.form == DraftForm::kSampled) {
    const double total = source.logsumexp[statistic];
    stats.threshold = source.threshold[statistic];
    stats.inv_t = inverse_temperature(temperature);
    d.broken = !std::isfinite(total) || std::isnan(stats.threshold);
    // exp(l / T - total), relative to a logit near the maximum, where float32 subtracts exactly.
    stats.max = static_cast<float>(total / stats.inv_t);
    stats.log_sum = total - static_cast<double>(stats.max) * stats.inv_t;
    d.weight_params = stats.weight_params();
  } else if (source.kind == Kind::kProbs) {
    d.probs = true;
  } else {
    stats = measure(d.row, {temperature, 0, 1.0f, 0.0f}, parallel, scratch);
    d.broken = !stats.valid;
    d.checked = stats.valid;
    if (stats.valid) d.weight_params = stats.weight_params();
  }
  d.look_up(x);
  return d;
}

}  // namespace specdec::cpu
