#include "cpu/row/filter.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "specdec/filter.h"
#include "specdec/ordered_key.h"

namespace specdec::cpu {
namespace {

// A selection looks at 11 + 11 + 10 bits of the ordered key, most significant first.
constexpr int kShifts[] = {21, 10, 0};
constexpr uint32_t kMasks[] = {0x7ff, 0x7ff, 0x3ff};

struct RadixSelection {
  const RowView& row;
  const std::vector<float>& maxima;
  WeightParams weight_params;
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
      tile_kernels().histogram(row.tile(t, buffer), row.tile_size(t), weight_params, h);
    }
  }

  // The largest key, at least `low`, such that the entries at and above it reach the goal.
  // reached(bin) is called from the top bin down: it returns true if the goal lies in that bin,
  // else it adds the bin to what was seen.
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
      // Rounding may leave a goal just unreached: then every entry seen survives.
      if (bin < 0) return level == 0 ? low : prefix | shifted;
      prefix |= shifted;
    }
    return prefix;
  }
};

bool has_top_k(const SequenceParams& params, int64_t vocab) {
  return params.top_k > 0 && params.top_k < vocab;
}

// The largest float of [low, high] for which `reaches` holds. It must hold for low, and for every
// float below one for which it holds.
template <class Reaches>
float last_to_reach(float low, float high, Reaches&& reaches) {
  uint32_t begin = ordered_key(low), end = ordered_key(high);
  while (begin < end) {
    const uint32_t middle = begin + (end - begin + 1) / 2;
    if (reaches(from_ordered_key(middle))) {
      begin = middle;
    } else {
      end = middle - 1;
    }
  }
  return from_ordered_key(begin);
}

// A lower bound of the threshold of the first filter that is set, found from the strip maxima
// alone.
float floor_of(const RowView& row, const SequenceParams& params, double total,
               const RowStats& stats, Scratch& scratch) {
  const TileKernels& k = tile_kernels();
  const float* strip_maxima = scratch.strip_maxima.data();
  const auto n = static_cast<int64_t>(scratch.strip_maxima.size());
  if (has_top_k(params, row.vocab())) {
    // The k-th largest strip maximum: at least k entries reach it.
    return last_to_reach(-INFINITY, stats.max, [&](float floor) {
      return k.count(strip_maxima, n, floor) >= params.top_k;
    });
  }
  if (params.top_p == 1) return min_p_threshold(stats.max, params.temperature, params.min_p);
  // Entries under (1-p)/V of the largest weight hold less than 1-p of the mass together. The bound
  // is higher if the strip maxima above it hold p of the mass already.
  const double gap = params.temperature * std::log((1.0 - params.top_p) / row.vocab());
  std::vector<float>& weights = scratch.strip_weights;
  weights.resize(scratch.strip_maxima.size());
  k.weights(strip_maxima, n, {stats.max, stats.inv_t, -INFINITY, 1.0f}, weights.data());
  const double goal = params.top_p * total;
  return last_to_reach(static_cast<float>(stats.max + gap), stats.max, [&](float floor) {
    return static_cast<double>(k.mass(strip_maxima, weights.data(), n, floor)) >= goal;
  });
}

// Returns false if there are too many.
bool list_survivors(const RowView& row, float floor, const Scratch& scratch, Survivors& s) {
  s.count = 0;
  for (int64_t b = 0; b < static_cast<int64_t>(scratch.strip_maxima.size()); ++b) {
    if (!(scratch.strip_maxima[b] >= floor)) continue;
    if (s.count + kStrip > kTile) return false;
    const int64_t begin = b * kStrip, n = std::min(kStrip, row.vocab() - begin);
    float buffer[kStrip];
    s.count += tile_kernels().gather(row.read(begin, n, buffer), n, begin, floor,
                                     s.values + s.count, s.ids + s.count);
  }
  return true;
}

void drop_below(float floor, Survivors& s) {
  int64_t kept = 0;
  for (int64_t i = 0; i < s.count; ++i) {
    s.values[kept] = s.values[i];
    s.ids[kept] = s.ids[i];
    kept += s.values[i] >= floor;
  }
  s.count = kept;
}

float threshold_of_list(const SequenceParams& params, int64_t vocab, float floor, double total,
                        const RowStats& stats, Survivors& s) {
  const TileKernels& k = tile_kernels();
  float keep = floor;
  if (has_top_k(params, vocab)) {
    keep = last_to_reach(floor, stats.max, [&](float low) {
      return k.count(s.values, s.count, low) >= params.top_k;
    });
    drop_below(keep, s);
  }
  if (params.top_p < 1) {
    float weights[kTile];
    k.weights(s.values, s.count, {stats.max, stats.inv_t, -INFINITY, 1.0f}, weights);
    if (has_top_k(params, vocab)) total = k.mass(s.values, weights, s.count, keep);
    const double goal = params.top_p * total;
    keep = last_to_reach(keep, stats.max, [&](float low) {
      return static_cast<double>(k.mass(s.values, weights, s.count, low)) >= goal;
    });
  }
  return keep;
}

float threshold_by_radix(const RowView& row, const SequenceParams& params, float floor,
                         double total, const RowStats& stats, Scratch& scratch) {
  if (scratch.histogram == nullptr) scratch.histogram.reset(new Histogram);
  RadixSelection s{
      row, scratch.maxima, {stats.max, stats.inv_t, -INFINITY, 1.0f}, *scratch.histogram};
  float keep = floor;
  if (has_top_k(params, row.vocab())) {
    int64_t above = 0;
    keep = from_ordered_key(s.select(ordered_key(floor), [&](int bin) {
      if (above + s.h.counts[bin] >= params.top_k) return true;
      above += s.h.counts[bin];
      return false;
    }));
  }
  if (params.top_p < 1) {
    double goal = has_top_k(params, row.vocab()) ? -1 : params.top_p * total, above = 0;
    keep = from_ordered_key(s.select(ordered_key(keep), [&](int bin) {
      if (goal < 0) {
        goal = 0;
        for (double mass : s.h.masses) goal += mass;
        goal *= params.top_p;
      }
      if (above + s.h.masses[bin] >= goal) return true;
      above += s.h.masses[bin];
      return false;
    }));
  }
  return keep;
}

}  // namespace

bool needs_total(const SequenceParams& params, int64_t vocab) {
  return params.top_p < 1 && !has_top_k(params, vocab);
}

void filter(const RowView& row, const SequenceParams& params, double total, RowStats& stats,
            Scratch& scratch) {
  if (scratch.survivors == nullptr) scratch.survivors.reset(new Survivors);
  Survivors& s = *scratch.survivors;
  const float floor = floor_of(row, params, total, stats, scratch);
  // Where fewer than top_k entries are finite, as under a grammar, they alone are listed.
  const float listed = std::max(floor, std::numeric_limits<float>::lowest());
  stats.listed = list_survivors(row, listed, scratch, s);
  stats.threshold = stats.listed ? threshold_of_list(params, row.vocab(), floor, total, stats, s)
                                 : threshold_by_radix(row, params, floor, total, stats, scratch);
  stats.threshold =
      std::max(stats.threshold, min_p_threshold(stats.max, params.temperature, params.min_p));
  if (stats.listed) drop_below(stats.threshold, s);
}

}  // namespace specdec::cpu
