#include "cpu/row.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cpu/filter.h"

namespace specdec {

bool Params::valid() const {
  return std::isfinite(temperature) && temperature >= 0 && top_k >= 0 && top_p > 0 && top_p <= 1 &&
         min_p >= 0 && min_p <= 1;
}

bool Params::filters(int64_t vocab) const {
  return (top_k > 0 && top_k < vocab) || top_p < 1 || min_p > 0;
}

Params params_of(const SamplingParams& s, int64_t b) {
  return {s.temperatures ? s.temperatures[b] : s.temperature, s.top_ks ? s.top_ks[b] : s.top_k,
          s.top_ps ? s.top_ps[b] : s.top_p, s.min_ps ? s.min_ps[b] : s.min_p};
}

float inverse_temperature(float temperature) { return std::min(1.0f / temperature, FLT_MAX); }

RowView::RowView(const Rows& rows, int64_t sequence, int64_t row, int64_t vocab, bool as_log)
    : vocab_(vocab), dtype_(rows.dtype), as_log_(as_log) {
  const int64_t bytes = rows.dtype == DType::kFloat32 ? 4 : 2;
  data_ = static_cast<const char*>(rows.data) +
          bytes * (sequence * rows.stride_sequence + row * rows.stride_row);
}

int64_t RowView::tile_size(int64_t t) const { return std::min(kTile, vocab_ - t * kTile); }

const float* RowView::read(int64_t begin, int64_t n, float* scratch) const {
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
  if (!as_log_) return out;
  k.log(out, n, scratch);
  return scratch;
}

const float* RowView::tile(int64_t t, float* scratch) const {
  return read(t * kTile, tile_size(t), scratch);
}

float RowView::at(int64_t index) const {
  float one;
  return *read(index, 1, &one);
}

void RowView::gather(const int32_t* columns, int64_t n, float rest, float* out) const {
  for (int64_t j = 0; j < n; ++j) {
    out[j] = columns[j] >= 0 && columns[j] < vocab_ ? at(columns[j]) : rest;
  }
}

double Law::logprob(const RowView& row, int64_t index) const {
  if (point) return index == argmax ? 0.0 : -INFINITY;
  const float l = row.at(index);
  if (direct) return std::log(static_cast<double>(l));
  if (!(l >= threshold)) return -INFINITY;
  return (static_cast<double>(l) - max) * inv_t - log_sum;
}

Shape Law::shape() const { return {max, inv_t, threshold, static_cast<float>(std::exp(-log_sum))}; }

int64_t argmax(const RowView& row, float max, const std::vector<float>& maxima) {
  for (int64_t t = 0; t < row.tiles(); ++t) {
    if (maxima[t] != max) continue;
    float scratch[kTile];
    const float* tile = row.tile(t, scratch);
    return t * kTile + (std::find(tile, tile + row.tile_size(t), max) - tile);
  }
  return -1;
}

Law measure(const RowView& row, const Params& params, const Parallel& parallel, Scratch& scratch) {
  const TileKernels& k = tile_kernels();
  const int64_t tiles = row.tiles();
  scratch.sums.resize(tiles);
  scratch.maxima.resize(tiles);
  const bool point = params.temperature == 0;
  const bool filtered = !point && params.filters(row.vocab());
  const bool blocks = filtered && params.top_k > 0;
  if (blocks) scratch.blocks.resize((row.vocab() + kBlock - 1) / kBlock);

  Law law;
  law.point = point;
  law.threshold = -INFINITY;
  if (!point) law.inv_t = inverse_temperature(params.temperature);
  float* sums = scratch.sums.data();
  float* maxima = scratch.maxima.data();
  parallel(tiles, [&](int64_t begin, int64_t end) {
    float buffer[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const float* tile = row.tile(t, buffer);
      const int64_t n = row.tile_size(t);
      const Peak peak =
          k.peak(tile, n, blocks ? scratch.blocks.data() + t * (kTile / kBlock) : nullptr);
      maxima[t] = peak.nan ? NAN : peak.max;
      if (!point && !filtered && std::isfinite(peak.max)) {
        sums[t] = k.sum_exp(tile, n, {peak.max, law.inv_t, -INFINITY, 1.0f});
      }
    }
  });
  law.max = -INFINITY;
  bool nan = false;
  for (int64_t t = 0; t < tiles; ++t) {
    nan |= std::isnan(maxima[t]);
    law.max = std::max(law.max, maxima[t]);
  }
  law.finite = !nan && std::isfinite(law.max);
  if (!law.finite) return law;
  if (point) {
    law.argmax = argmax(row, law.max, scratch.maxima);
    law.threshold = law.max;
    return law;
  }
  if (filtered) {
    law.threshold = filter_threshold(row, params, law.max, scratch);
    const Shape shape{law.max, law.inv_t, law.threshold, 1.0f};
    parallel(tiles, [&](int64_t begin, int64_t end) {
      float buffer[kTile];
      for (int64_t t = begin; t < end; ++t) {
        sums[t] = maxima[t] >= law.threshold
                      ? k.sum_exp(row.tile(t, buffer), row.tile_size(t), shape)
                      : 0.0f;
      }
    });
  } else {
    for (int64_t t = 0; t < tiles; ++t) {
      const double gap = (static_cast<double>(maxima[t]) - law.max) * law.inv_t;
      // Where a tile's weights vanish when it is read again, so must its sum.
      sums[t] = gap < kSmallestExponent ? 0.0f : static_cast<float>(sums[t] * std::exp(gap));
    }
  }
  double total = 0;
  for (int64_t t = 0; t < tiles; ++t) total += static_cast<double>(sums[t]);
  law.log_sum = std::log(total);
  return law;
}

int64_t draw(const RowView& row, const Law& law, const Scratch& scratch, double uniform) {
  if (law.point) return law.argmax;
  return draw(row, scratch.sums, uniform, [&](int64_t t, float* out) {
    float buffer[kTile];
    tile_kernels().weights(row.tile(t, buffer), row.tile_size(t),
                           {law.max, law.inv_t, law.threshold, 1.0f}, out);
  });
}

int64_t race(const RowView& row, const Law& law, const RaceNoise& noise, const Parallel& parallel) {
  if (law.point) return law.argmax;
  std::vector<Best> best(row.tiles());
  const Shape shape{law.max, law.inv_t, law.threshold, 1.0f};
  parallel(row.tiles(), [&](int64_t begin, int64_t end) {
    float buffer[kTile];
    for (int64_t t = begin; t < end; ++t) {
      best[t] = tile_kernels().race(row.tile(t, buffer), row.tile_size(t), t * kTile, shape, noise);
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

}  // namespace specdec
