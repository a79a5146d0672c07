#include "cpu/row/distribution.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "cpu/row/filter.h"
#include "specdec/row_stats.h"

namespace specdec::cpu {

RowView::RowView(const Rows& rows, int64_t sequence, int64_t row, int64_t vocab, Read read)
    : allowed_(rows.allowed.row(sequence, row)), vocab_(vocab), dtype_(rows.dtype), read_(read) {
  const int64_t bytes = rows.dtype == DType::kFloat32 ? 4 : 2;
  data_ = static_cast<const char*>(rows.data) +
          bytes * (sequence * rows.stride_sequence + row * rows.stride_row);
}

int64_t RowView::tile_size(int64_t t) const { return std::min(kTile, vocab_ - t * kTile); }

const float* RowView::convert(int64_t begin, int64_t n, float* scratch) const {
  const TileKernels& k = tile_kernels();
  const float* out = scratch;
  switch (dtype_) {
    case DType::kFloat32:
      out = static_cast<const float*>(data_) + begin;
      break;
    case DType::kBFloat16:
      k.from_bfloat16(static_cast<const uint16_t*>(data_) + begin, n, scratch);
      break;
    case DType::kFloat16:
      k.from_float16(static_cast<const uint16_t*>(data_) + begin, n, scratch);
      break;
  }
  if (read_ != Read::kLogOfProbs) return out;
  k.log(out, n, scratch);
  return scratch;
}

const float* RowView::read(int64_t begin, int64_t n, float* scratch) const {
  if (allowed_ == nullptr) return convert(begin, n, scratch);
  const float rest = entry_not_allowed(read_);
  if (begin % 32 != 0) {  // columns of a draft beyond the target's vocabulary
    const float* const values = convert(begin, n, scratch);
    for (int64_t j = 0; j < n; ++j) scratch[j] = is_allowed(allowed_, begin + j) ? values[j] : rest;
    return scratch;
  }
  const uint32_t* const words = allowed_ + begin / 32;
  // Most tiles of a grammar's mask are empty: they are not read.
  if (std::all_of(words, words + bitmask_words(n), [](uint32_t word) { return word == 0; })) {
    std::fill(scratch, scratch + n, rest);
  } else {
    tile_kernels().keep_allowed(convert(begin, n, scratch), n, words, rest, scratch);
  }
  return scratch;
}

const float* RowView::tile(int64_t t, float* scratch) const {
  return read(t * kTile, tile_size(t), scratch);
}

float RowView::at(int64_t index) const {
  float one;
  return is_allowed(allowed_, index) ? *convert(index, 1, &one) : entry_not_allowed(read_);
}

void RowView::gather(const int32_t* columns, int64_t n, float rest, float* out) const {
  for (int64_t j = 0; j < n; ++j) {
    out[j] = columns[j] >= 0 && columns[j] < vocab_ ? at(columns[j]) : rest;
  }
}

double RowStats::logprob(const RowView& row, int64_t index) const {
  if (one_hot) return index == argmax ? 0.0 : -INFINITY;
  return entry_logprob(*this, row.at(index));
}

WeightParams RowStats::weight_params() const {
  return {max, inv_t, threshold, static_cast<float>(std::exp(-log_sum))};
}

int64_t argmax(const RowView& row, float max, const std::vector<float>& maxima) {
  for (int64_t t = 0; t < row.tiles(); ++t) {
    if (maxima[t] != max) continue;
    float scratch[kTile];
    const float* tile = row.tile(t, scratch);
    return t * kTile + (std::find(tile, tile + row.tile_size(t), max) - tile);
  }
  return -1;
}

double total(const std::vector<float>& sums) {
  double sum = 0;
  for (float s : sums) sum += static_cast<double>(s);
  return sum;
}

namespace {

// Finds the maximum of each tile; if asked for, also those of its strips and its sum of
// exponentials relative to its own maximum.
void read_tiles(const RowView& row, float inv_t, bool strips, bool sums, const Parallel& parallel,
                Scratch& scratch) {
  const TileKernels& k = tile_kernels();
  scratch.sums.resize(row.tiles());
  scratch.maxima.resize(row.tiles());
  if (strips) scratch.strip_maxima.resize((row.vocab() + kStrip - 1) / kStrip);
  parallel(row.tiles(), [&](int64_t begin, int64_t end) {
    float buffer[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const float* tile = row.tile(t, buffer);
      const int64_t n = row.tile_size(t);
      const Peak peak =
          k.peak(tile, n, strips ? scratch.strip_maxima.data() + t * (kTile / kStrip) : nullptr);
      scratch.maxima[t] = peak.nan ? NAN : peak.max;
      if (sums && std::isfinite(peak.max)) {
        scratch.sums[t] = k.sum_exp(tile, n, {peak.max, inv_t, -INFINITY, 1.0f});
      }
    }
  });
}

// Rescales the sums from the maxima of the tiles to that of the row; returns their total.
double join_sums(const RowStats& stats, Scratch& scratch) {
  const float floor = weight_floor({stats.max, stats.inv_t, -INFINITY, 1.0f});
  double total = 0;
  for (size_t t = 0; t < scratch.sums.size(); ++t) {
    const double gap = (static_cast<double>(scratch.maxima[t]) - stats.max) * stats.inv_t;
    // A tile whose weights come out as 0 when it is read again must have no sum either.
    scratch.sums[t] =
        scratch.maxima[t] < floor ? 0.0f : static_cast<float>(scratch.sums[t] * std::exp(gap));
    total += static_cast<double>(scratch.sums[t]);
  }
  return total;
}

double sum_survivors(const RowView& row, const RowStats& stats, const Parallel& parallel,
                     Scratch& scratch) {
  const TileKernels& k = tile_kernels();
  const WeightParams weight_params{stats.max, stats.inv_t, stats.threshold, 1.0f};
  if (stats.listed) {
    const Survivors& s = *scratch.survivors;
    return static_cast<double>(k.sum_exp(s.values, s.count, weight_params));
  }
  parallel(row.tiles(), [&](int64_t begin, int64_t end) {
    float buffer[kTile];
    for (int64_t t = begin; t < end; ++t) {
      scratch.sums[t] = scratch.maxima[t] >= stats.threshold
                            ? k.sum_exp(row.tile(t, buffer), row.tile_size(t), weight_params)
                            : 0.0f;
    }
  });
  return total(scratch.sums);
}

}  // namespace

RowStats measure(const RowView& row, const SequenceParams& params, const Parallel& parallel,
                 Scratch& scratch, bool strips) {
  RowStats stats;
  stats.one_hot = params.temperature == 0;
  stats.threshold = -INFINITY;
  if (!stats.one_hot) stats.inv_t = inverse_temperature(params.temperature);
  const bool filtered = !stats.one_hot && params.filters(row.vocab());
  const bool sums = !stats.one_hot && (!filtered || needs_total(params, row.vocab()));
  read_tiles(row, stats.inv_t, filtered || strips, sums, parallel, scratch);
  stats.max = -INFINITY;
  bool nan = false;
  for (float max : scratch.maxima) {
    nan |= std::isnan(max);
    stats.max = std::max(stats.max, max);
  }
  stats.valid = !nan && std::isfinite(stats.max);
  if (!stats.valid) return stats;
  if (stats.one_hot) {
    stats.argmax = argmax(row, stats.max, scratch.maxima);
    stats.threshold = stats.max;
    return stats;
  }
  double mass = sums ? join_sums(stats, scratch) : 0;
  if (filtered) {
    filter(row, params, mass, stats, scratch);
    mass = sum_survivors(row, stats, parallel, scratch);
  }
  stats.log_sum = std::log(mass);
  return stats;
}

RowStats measure_direct(const RowView& row, const Parallel& parallel, Scratch& scratch) {
  const TileKernels& k = tile_kernels();
  std::vector<float>& sums = scratch.sums;
  sums.resize(row.tiles());
  parallel(row.tiles(), [&](int64_t begin, int64_t end) {
    float buffer[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const float* tile = row.tile(t, buffer);
      const int64_t n = row.tile_size(t);
      sums[t] = k.is_distribution(tile, n) ? k.sum(tile, n) : NAN;
    }
  });
  const double mass = total(sums);
  RowStats stats;
  stats.direct = true;
  stats.valid = mass > 0 && std::isfinite(mass);
  return stats;
}

double entropy(const RowView& row, const RowStats& stats, const Parallel& parallel,
               std::vector<float>& sums) {
  const WeightParams weight_params = stats.weight_params();
  sums.resize(row.tiles());
  parallel(row.tiles(), [&](int64_t begin, int64_t end) {
    float buffer[kTile], p[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const float* tile = row.tile(t, buffer);
      const int64_t n = row.tile_size(t);
      tile_kernels().weights(tile, n, weight_params, p);
      for (int64_t j = 0; j < n; ++j) p[j] = p[j] > 0 ? p[j] * (tile[j] - stats.max) : 0;
      sums[t] = tile_kernels().sum(p, n);
    }
  });
  return stats.log_sum - total(sums) * stats.inv_t;
}

int64_t count_larger(const RowView& row, float value, const Parallel& parallel,
                     std::vector<float>& counts) {
  counts.resize(row.tiles());
  parallel(row.tiles(), [&](int64_t begin, int64_t end) {
    float buffer[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const float* tile = row.tile(t, buffer);
      const int64_t n = row.tile_size(t);
      int32_t larger = 0;
      for (int64_t j = 0; j < n; ++j) larger += tile[j] > value;
      counts[t] = static_cast<float>(larger);  // exact: a tile has few entries
    }
  });
  return static_cast<int64_t>(total(counts));
}

void target_weights(const RowView& row, const RowStats& stats, int64_t t, double c, float* out) {
  const int64_t n = row.tile_size(t);
  const float* tile = row.tile(t, out);
  if (!stats.direct) {
    WeightParams weight_params = stats.weight_params();
    weight_params.scale = static_cast<float>(weight_params.scale * c);
    tile_kernels().weights(tile, n, weight_params, out);
    return;
  }
  for (int64_t j = 0; j < n; ++j) out[j] = static_cast<float>(c * tile[j]);
}

void survivor_weights(const RowStats& stats, const Survivors& s, double c, float* out) {
  WeightParams weight_params = stats.weight_params();
  weight_params.scale = static_cast<float>(weight_params.scale * c);
  tile_kernels().weights(s.values, s.count, weight_params, out);
}

int64_t draw(const RowView& row, const RowStats& stats, const Scratch& scratch, double uniform) {
  if (stats.one_hot) return stats.argmax;
  if (stats.direct) {
    return draw(row, scratch.sums, uniform,
                [&](int64_t t, float* out) { target_weights(row, stats, t, 1.0, out); });
  }
  if (stats.listed) {
    const Survivors& s = *scratch.survivors;
    float weights[kTile];
    tile_kernels().weights(s.values, s.count, {stats.max, stats.inv_t, stats.threshold, 1.0f},
                           weights);
    const int64_t index =
        tile_kernels().pick(weights, s.count, 0, uniform * std::exp(stats.log_sum));
    return index < 0 ? -1 : s.ids[index];
  }
  return draw(row, scratch.sums, uniform, [&](int64_t t, float* out) {
    float buffer[kTile];
    tile_kernels().weights(row.tile(t, buffer), row.tile_size(t),
                           {stats.max, stats.inv_t, stats.threshold, 1.0f}, out);
  });
}

int64_t gumbel_argmax(const RowView& row, const RowStats& stats, const Scratch& scratch,
                      const GumbelNoise& noise, const Parallel& parallel) {
  if (stats.one_hot) return stats.argmax;
  const WeightParams weight_params{stats.max, stats.inv_t, stats.threshold, 1.0f};
  if (stats.listed) {
    const Survivors& s = *scratch.survivors;
    const Best best = tile_kernels().gumbel_among(s.values, s.ids, s.count, weight_params, noise);
    return best.index < 0 ? -1 : s.ids[best.index];
  }
  return gumbel_argmax(row, stats, noise, parallel);
}

int64_t gumbel_argmax(const RowView& row, const RowStats& stats, const GumbelNoise& noise,
                      const Parallel& parallel) {
  if (stats.one_hot) return stats.argmax;
  std::vector<Best> best(row.tiles());
  const WeightParams weight_params{stats.max, stats.inv_t, stats.threshold, 1.0f};
  parallel(row.tiles(), [&](int64_t begin, int64_t end) {
    float buffer[kTile], floor = -INFINITY;
    for (int64_t t = begin; t < end; ++t) {
      best[t] = tile_kernels().gumbel(row.tile(t, buffer), row.tile_size(t), t * kTile,
                                      weight_params, noise, floor);
      floor = std::max(floor, best[t].score);
    }
  });
  int64_t winner = -1;
  float score = -INFINITY;
  for (int64_t t = 0; t < row.tiles(); ++t) {
    if (best[t].index >= 0 && best[t].score > score) {
      score = best[t].score;
      winner = t * kTile + best[t].index;
    }
  }
  return winner;
}

}  // namespace specdec::cpu
