#include "cpu/filter.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "specdec/filters.h"

namespace specdec {
namespace {

// 11 + 11 + 10 bits of the key, most significant first.
constexpr int kShifts[] = {21, 10, 0};
constexpr uint32_t kMasks[] = {0x7ff, 0x7ff, 0x3ff};

struct Selection {
  const RowView& row;
  const std::vector<float>& maxima;
  Shape shape;
  Histogram& h;

  void count(uint32_t low, uint32_t high, int level) {
    h.low = low;
    h.high = high;
    h.shift = kShifts[level];
    h.mask = kMasks[level];
    std::memset(h.counts, 0, sizeof h.counts);
    std::memset(h.masses, 0, sizeof h.masses);
    float buffer[kTile];
    for (int64_t t = 0; t < row.tiles(); ++t) {
      if (ordered_key(maxima[t]) < low) continue;
      tile_kernels().histogram(row.tile(t, buffer), row.tile_size(t), shape, h);
    }
  }

  // Largest key whose entries at and above it reach the goal, of keys from low on. reached() looks
  // at one bin, from the top: true if the goal lies in it, else it adds the bin.
  template <class Reached>
  uint32_t select(uint32_t low, Reached&& reached) {
    uint32_t prefix = 0;
    for (int level = 0; level < 3; ++level) {
      const uint32_t high = level == 0 ? ~0u : prefix | ((1u << kShifts[level - 1]) - 1);
      count(std::max(low, prefix), high, level);
      int bin = static_cast<int>(kMasks[level]), last = bin;
      for (; bin >= 0; --bin) {
        if (h.counts[bin] == 0) continue;
        last = bin;
        if (reached(bin)) break;
      }
      const uint32_t shifted = static_cast<uint32_t>(bin < 0 ? last : bin) << kShifts[level];
      // Rounding may leave a goal unreached by a hair: then all that was seen survives.
      if (bin < 0) return level == 0 ? low : prefix | shifted;
      prefix |= shifted;
    }
    return prefix;
  }
};

}  // namespace

float filter_threshold(const RowView& row, const Params& params, float max, Scratch& scratch) {
  float keep = -INFINITY;
  if (scratch.histogram.empty()) scratch.histogram.resize(1);
  Selection s{row,
              scratch.maxima,
              {max, inverse_temperature(params.temperature), -INFINITY, 1.0f},
              scratch.histogram[0]};

  if (params.top_k > 0 && params.top_k < row.vocab()) {
    // The k-th largest block maximum is a floor: at least k entries reach it.
    float floor = -INFINITY;
    const auto k = static_cast<size_t>(params.top_k);
    if (k <= scratch.blocks.size()) {
      std::nth_element(scratch.blocks.begin(), scratch.blocks.begin() + (k - 1),
                       scratch.blocks.end(), std::greater<float>());
      floor = scratch.blocks[k - 1];
    }
    int64_t above = 0;
    const uint32_t key = s.select(ordered_key(floor), [&](int bin) {
      if (above + s.h.counts[bin] >= params.top_k) return true;
      above += s.h.counts[bin];
      return false;
    });
    keep = from_ordered_key(key);
  }

  if (params.top_p < 1) {
    uint32_t low = ordered_key(keep);
    double goal = -1, above = 0;
    if (!(keep > -INFINITY)) {
      // Entries under (1-p)/V of the largest weight hold less than 1-p of the mass together.
      const double cut = max + params.temperature * std::log((1.0 - params.top_p) / row.vocab());
      low = ordered_key(static_cast<float>(cut));
      double total = 0;
      float buffer[kTile];
      for (int64_t t = 0; t < row.tiles(); ++t) {
        total += static_cast<double>(
            tile_kernels().sum_exp(row.tile(t, buffer), row.tile_size(t), s.shape));
      }
      goal = params.top_p * total;
    }
    const uint32_t key = s.select(low, [&](int bin) {
      if (goal < 0) {
        goal = 0;
        for (double mass : s.h.masses) goal += mass;
        goal *= params.top_p;
      }
      if (above + s.h.masses[bin] >= goal) return true;
      above += s.h.masses[bin];
      return false;
    });
    keep = std::max(keep, from_ordered_key(key));
  }
  return std::max(keep, min_p_threshold(max, params.temperature, params.min_p));
}

}  // namespace specdec
