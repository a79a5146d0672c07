#pragma once
// One row, a vector of V logits or probabilities: its statistics under the sampling parameters of
// its sequence, and draws from the distribution that they describe. Blocks compute statistics of
// each warp tile into global memory; then one block computes the row statistics from these.
//   row statistics   maximum, threshold and sum of exponentials: with them an entry of the row has
//                    a probability, so that the row is never copied or normalised
//   survivors        the tokens that top-k, top-p and min-p leave
//   direct           said of a row whose entries are the probabilities, used as they are
//   weight           a number proportional to the probability of an entry
//   units, mass      a sum of weights as an integer, see weights.cuh
//   scale            the weight that counts as kUnit units
#include "cuda/row/draw.cuh"
#include "specdec/filter.h"
#include "specdec/math.h"
#include "specdec/row_stats.h"
#include "specdec/sequence_params.h"

namespace specdec::cuda {

// Statistics of the warp tiles of one row, in global memory.
struct TileStats {
  int64_t* units;  // [warp_tiles], mass of the tile, on the scale given by its entry in `maxima`
  uint64_t* best;  // [warp_tiles], see pack_best: the best Gumbel score, or the maximum
  float* maxima;   // [warp_tiles], the largest logit, or a scale of the weights; NaN if not valid
};

// TileStats of several rows one after the other; `best` is there only if `has_best`.
struct TileStatsArray {
  char* memory;
  int64_t warp_tiles;
  bool has_best;

  static SPECDEC_HD int64_t bytes(int64_t warp_tiles, bool has_best) {
    return (warp_tiles * (has_best ? 20 : 12) + 15) / 16 * 16;
  }
  __device__ TileStats operator[](int64_t i) const {
    char* const at = memory + i * bytes(warp_tiles, has_best);
    TileStats s;
    s.units = reinterpret_cast<int64_t*>(at);
    s.best = reinterpret_cast<uint64_t*>(s.units + warp_tiles);
    s.maxima = reinterpret_cast<float*>(s.best + (has_best ? warp_tiles : 0));
    return s;
  }
};

inline __device__ bool is_finite(double x) { return fabs(x) < INFINITY; }

// The use that a row is read for: to draw by mass (kLinear: in a direct row), by Gumbel-max
// sampling, or to find the maximum.
enum class Want : int32_t { kMass, kGumbel, kArgmax, kLinear };

// The use that tile statistics are first computed for, before filters.
inline __device__ Want first_want(Want want, bool filtered, bool one_hot) {
  return one_hot ? Want::kArgmax : filtered ? Want::kMass : want;
}

struct RowStats {
  float max;
  float inv_t;
  float threshold;  // in raw logits
  bool valid;       // the row holds a distribution
  bool one_hot;     // all mass on the maximum
  bool direct;     // entries are probabilities: the other fields but `valid` and log_sum are unused
  double log_sum;  // logarithm of the sum of exp((l - max) * inv_t) over the survivors

  __device__ double logprob(float l) const {
    return one_hot && l >= threshold ? 0.0 : entry_logprob(*this, l);
  }
};

// The mass of non-negative weights in integer units. `top` is their maximum and becomes their
// scale, or NaN if it is not finite.
inline __device__ int64_t linear_units(const float (&w)[kPerLane], bool wide, float& top) {
  if (!is_finite(top)) {
    top = NAN;
    return 0;
  }
  top = scale_of(top);
  return warp_mass(lane_units(w, wide, inverse_scale(top)));
}

// Turns weights into units of their scale, for `warp_tile_pick`.
inline __device__ void scale_down(float (&values)[kPerLane], float scale) {
  const float inverse = inverse_scale(scale);
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) values[j] = values[j] > 0 ? values[j] * inverse : 0.0f;
}

// The warp tiles of a thread, where each thread of a block has a run of them, and the statistics of
// the first two, loaded at once. Rows of up to 262,144 entries have no more for a thread.
struct TileRun {
  static constexpr int kLoaded = 2;
  int begin, end;
  float maxima[kLoaded];
  int64_t units[kLoaded];

  __device__ TileRun(const TileStats& tile_stats, int64_t warp_tiles) {
    const auto tiles = static_cast<int>(warp_tiles), length = (tiles + kThreads - 1) / kThreads;
    begin = thread_id() * length < tiles ? thread_id() * length : tiles;
    end = begin + length < tiles ? begin + length : tiles;
    load(tile_stats, begin);
  }

  __device__ void load(const TileStats& tile_stats, int first) {
#pragma unroll
    for (int k = 0; k < kLoaded; ++k) {
      const bool inside = first + k < end;
      maxima[k] = inside ? tile_stats.maxima[first + k] : -INFINITY;
      units[k] = inside ? tile_stats.units[first + k] : 0;
    }
  }

  // The maximum of the row, or its largest scale; NaN if one tile has NaN.
  __device__ float largest(ThreadBlock& block, const TileStats& tile_stats) const {
    uint32_t best = 0;
    const auto add = [&](float max) {
      const uint32_t key = ordered_key(max);
      best = key > best ? key : best;
    };
    for (const float max : maxima) add(max);
#pragma unroll 1
    for (int i = begin + kLoaded; i < end; ++i) add(tile_stats.maxima[i]);
    return from_ordered_key(block.max_key(best));
  }
};

inline __device__ int ceil_log2(int64_t n) { return n <= 1 ? 0 : 64 - __clzll(n - 1); }

// x * 2^exponent, both of which are 0 or normal; x is not negative.
inline __device__ double scaled(double x, int exponent) {
  return x == 0 ? 0 : bits_as<double>(bits_as<int64_t>(x) + (static_cast<int64_t>(exponent) << 52));
}

// The masses of the warp tiles of a row on one scale. All scales are powers of two.
class WarpTileScale {
 public:
  // On that of a tile with the maximum `max`, or if `linear` with the scale `max`.
  __device__ WarpTileScale(const TileStats& tile_stats, int64_t warp_tiles, float max, float inv_t,
                           bool linear)
      : tile_stats_(tile_stats),
        max_(max),
        rate_(rate_of(inv_t)),
        linear_(linear),
        log2_(ceil_log2(warp_tiles)) {}

  // The sum of weights whose masses add up to `total`: on the scale of the maximum, or if `linear`
  // on that of the weights.
  __device__ double sum(int64_t total) const {
    if (linear_ && !is_finite(max_)) return max_;
    const int scale = linear_ ? exponent_bits(max_) - exponent_bits(1.0f) : 0;
    return scaled(static_cast<double>(total), log2_ - kUnitBits + scale);
  }

  // The logarithm of the sum of exp((l - max) / T), or if `linear` of the weights.
  __device__ double log_sum(int64_t total) const {
    const double above = linear_ ? 0.0f : tile_offset(max_, rate_).above;
    return log_of(sum(total)) - M_LN2 * above;
  }

  // What the units of a tile with the maximum, or the scale, `own` must be shifted by.
  __device__ int shift(float own) const {
    const int below =
        linear_ ? exponent_bits(max_) - exponent_bits(own) : tile_shift(own, rate_, max_);
    return below + log2_ < 63 ? below + log2_ : 63;
  }
  __device__ int shift_of(int i) const { return shift(tile_stats_.maxima[i]); }
  __device__ int64_t mass(int64_t units, float own) const {
    return units == 0 ? 0 : units >> shift(own);
  }
  __device__ int64_t mass_of(int i) const {
    return mass(tile_stats_.units[i], tile_stats_.maxima[i]);
  }

  // The mass of a thread's tiles.
  __device__ int64_t mass_of(TileRun run) const {
    if (!is_finite(max_)) return 0;
    int64_t sum = 0;
#pragma unroll 1
    for (int first = run.begin;; run.load(tile_stats_, first)) {
#pragma unroll
      for (int k = 0; k < TileRun::kLoaded; ++k) sum += mass(run.units[k], run.maxima[k]);
      first += TileRun::kLoaded;
      if (first >= run.end) return sum;
    }
  }

 private:
  static __device__ int exponent_bits(float scale) {
    return static_cast<int>(bits_as<uint32_t>(scale) >> 23);
  }

  const TileStats& tile_stats_;
  const float max_, rate_;
  const bool linear_;
  const int log2_;
};

// The same masses, and a choice among them.
class WarpTileMasses {
 public:
  // `max` as for WarpTileScale.
  __device__ WarpTileMasses(ThreadBlock& block, const TileStats& tile_stats, int64_t warp_tiles,
                            const TileRun& run, float max, float inv_t, bool linear = false)
      : scale_(tile_stats, warp_tiles, max, inv_t, linear),
        begin_(run.begin),
        mine_(scale_.mass_of(run)) {
    before_ = block.sum_before(mine_, total_);
  }

  __device__ bool any() const { return total_ > 0; }
  // See WarpTileScale; if `linear`, not finite if the largest scale is not.
  __device__ double sum() const { return scale_.sum(total_); }
  __device__ double log_sum() const { return scale_.log_sum(total_); }

  // The warp tile in which the running mass passes u times the total; `rest` becomes the mass
  // between the start of this tile and that point, in the units of the tile. A u outside [0, 1)
  // counts as the nearest one inside, NaN as the largest: otherwise no thread would find its tile.
  __device__ int64_t choose(const ThreadBlock& block, double u, int64_t& rest) const {
    const auto total = static_cast<double>(total_);
    const double point = u * total;
    int64_t target = point < total ? static_cast<int64_t>(fmax(point, 0.0)) : total_;
    if (target >= total_) target = total_ - 1;
    if (before_ <= target && target < before_ + mine_) {
      int64_t running = before_;
      int i = begin_;
#pragma unroll 1
      for (;; ++i) {
        const int64_t mass = scale_.mass_of(i);
        if (running + mass > target) break;
        running += mass;
      }
      block.broadcast()[0] = i;
      block.broadcast()[1] = (target - running) << scale_.shift_of(i);
    }
    __syncthreads();
    rest = block.broadcast()[1];
    const int64_t chosen = block.broadcast()[0];
    __syncthreads();
    return chosen;
  }

 private:
  const WarpTileScale scale_;
  int begin_;
  int64_t mine_, before_, total_;
};

// Statistics of a row before any filter, except log_sum. Temperature 0 leaves only the maximum.
inline __device__ RowStats row_stats_of(ThreadBlock& block, const TileStats& tile_stats,
                                        const TileRun& run, float temperature) {
  RowStats stats = {};
  stats.max = run.largest(block, tile_stats);
  stats.inv_t = inverse_temperature(temperature);
  stats.one_hot = temperature == 0;
  stats.threshold = stats.one_hot ? stats.max : -INFINITY;
  stats.valid = is_finite(stats.max);
  return stats;
}

// Gumbel-max sampling: the token with the best score, the lowest id among equals. The score of a
// tile is relative to its own maximum.
inline __device__ int64_t gumbel_winner(ThreadBlock& block, const TileStats& tile_stats,
                                        int64_t warp_tiles, const RowStats& stats) {
  double best = 0;
  int64_t winner = 0;
  for (int64_t i = thread_id(); i < warp_tiles; i += kThreads) {
    const uint64_t packed = tile_stats.best[i];
    if (packed == 0) continue;
    const double score = scaled(score_of(packed),
                                -tile_shift(tile_stats.maxima[i], rate_of(stats.inv_t), stats.max));
    if (!(score > best)) continue;
    best = score;
    winner = i;
  }
  const uint64_t high = block.max(bits_as<uint64_t>(best));
  const bool mine = best > 0 && bits_as<uint64_t>(best) == high;
  winner = static_cast<int64_t>(block.min(mine ? static_cast<uint64_t>(winner) : ~uint64_t{0}));
  return winner * kWarpTile + index_of(tile_stats.best[winner]);
}

// Lowest id of the maximum.
inline __device__ int64_t argmax(ThreadBlock& block, const TileStats& tile_stats,
                                 int64_t warp_tiles, float max) {
  uint32_t first = ~0u;
  for (auto i = static_cast<uint32_t>(thread_id()); i < warp_tiles; i += kThreads) {
    if (tile_stats.maxima[i] != max) continue;
    first = i;
    break;
  }
  const uint32_t warp_tile = ~block.max_key(~first);
  return int64_t{warp_tile} * kWarpTile + index_of(tile_stats.best[warp_tile]);
}

}  // namespace specdec::cuda
