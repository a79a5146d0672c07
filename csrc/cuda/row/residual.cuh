#pragma once
// A target row beside the row of its draft, for chains and trees: the residual max(cP - lQ, 0), not
// normalised. c is the factor of P in rules block and traversal, l the lenience; each is 1 for
// other rules. It is summed by warp tile, and the warp tile that is drawn from is computed again:
// the values are never stored.
#include "cuda/row/draft.cuh"
#include "cuda/row/words.cuh"
#include "specdec/acceptance.h"
#include "specdec/sequence.h"

namespace specdec::cuda {

// Target row i of a sequence.
__forceinline__ __device__ RowView target_row(const VerifyParams& p, const SequenceState& s,
                                              int64_t i) {
  const RowIndex at = target_row_index(p, s, i);
  return RowView(p.target, at.sequence, at.row, p.vocab, target_read(p, s));
}

// Turns entries of a target row into cP. It is made once a row, because the normalisation takes an
// exponential in float64.
struct ScaledTarget {
  bool direct;
  double c;
  WeightParams weight_params;  // of logits
  float scale;                 // makes the weights sum to c

  ScaledTarget() = default;
  __device__ ScaledTarget(const RowStats& stats, bool direct, double c)
      : direct(direct), c(c), weight_params{}, scale(1) {
    if (direct) return;
    weight_params = {stats.max, rate_of(stats.inv_t), stats.threshold};
    scale = static_cast<float>(exp_of(-stats.log_sum) * c);
  }

  __device__ void normalise_all(float (&values)[kPerLane]) const {
    if (!direct) {
      weigh(values, weight_params);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] *= scale;
    } else if (c != 1) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = static_cast<float>(c * values[j]);
    }
  }
};

// Stores the sum of the positive part of `sign` times the values of a warp tile. Q is infinite
// where its statistics are those of another temperature, which is no fault of the row.
inline __device__ void store_positive(const TileStats& tile_stats, int64_t warp_tile,
                                      const float (&values)[kPerLane], bool wide, float sign,
                                      bool valid) {
  float w[kPerLane];
  uint32_t best = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    w[j] = fmaxf(sign * values[j], 0.0f);  // NaN becomes 0
    const auto bits = bits_as<uint32_t>(w[j]);
    best = bits > best ? bits : best;
  }
  const float top = bits_as<float>(warp_max(best));
  float scale = top;
  const int64_t units = linear_units(w, wide, scale);
  if (lane_id() != 0) return;
  tile_stats.maxima[warp_tile] = !valid ? NAN : top < INFINITY ? scale : top;
  tile_stats.units[warp_tile] = units;
}

// The rows of a residual as a loop over whole warp tiles reads them. It lies in shared memory and
// is read anew for each warp tile: in registers the loop would need more than 64.
struct ResidualRows {
  const char* target;
  const char* draft;
  TileStats positive;  // of the residual
  TileStats direct;    // of a direct target row, which was not read before
  int whole_tiles;
  int step;                                     // from one warp tile of a warp to its next one
  float rate, offset, scale;                    // of logits of the target
  float draft_rate, draft_offset, draft_scale;  // of the draft; draft_scale includes the lenience

  // Whether the loop serves these rows: entries of one dtype at aligned addresses that need neither
  // a map nor a threshold.
  static __device__ bool serves(const RowView& row, const ScaledTarget& target,
                                const DraftDistribution& d) {
    const bool same = d.pairs(row.wide()) && d.row.dtype == row.dtype && d.probs == target.direct &&
                      row.allowed == nullptr && d.row.allowed == nullptr;
    if (!same || !row.aligned() || !d.row.aligned()) return false;
    if (target.direct) return target.c == 1 && row.wide();
    return target.weight_params.threshold == -INFINITY && d.weight_params.threshold == -INFINITY;
  }

  ResidualRows() = default;
  __device__ ResidualRows(const RowView& row, const ScaledTarget& p, const DraftDistribution& d,
                          float lenience, const TileStats& positive, const TileStats& direct,
                          int step)
      : target(static_cast<const char*>(row.data)),
        draft(static_cast<const char*>(d.row.data)),
        positive(positive),
        direct(direct),
        whole_tiles(
            static_cast<int>((d.row.vocab < row.vocab ? d.row.vocab : row.vocab) / kWarpTile)),
        step(step),
        rate(p.weight_params.rate),
        offset(p.weight_params.offset),
        scale(p.scale),
        draft_rate(d.weight_params.rate),
        draft_offset(d.weight_params.offset),
        draft_scale(d.weight_scale() * lenience) {}
};

// Stores the sum of non-negative values with the maximum `top`.
template <DType kType>
inline __device__ void store_linear(const TileStats& tile_stats, int warp_tile,
                                    const float (&w)[kPerLane], float top) {
  const float scale = scale_of(top);
  const int64_t units = warp_mass(lane_units<run_of(Words<kType>::kWide)>(w, inverse_scale(scale)));
  if (lane_id() != 0) return;
  tile_stats.maxima[warp_tile] = scale;
  tile_stats.units[warp_tile] = units;
}

// Sums max(P - lQ, 0) over every step-th whole warp tile from `warp_tile` on, and over a direct
// row P too. Returns the first tile that it leaves to others: the end, or one with an entry that is
// not valid. Bit for bit what `subtract_draft` and `store_positive` compute.
template <DType kType, bool kProbs>
__forceinline__ __device__ int sum_residual(const ResidualRows& rows, int warp_tile) {
  if (warp_tile >= rows.whole_tiles) return warp_tile;
  Words<kType> p, q;
  p.load(rows.target + lane_id() * 16, warp_tile);
  q.load(rows.draft + lane_id() * 16, warp_tile);
  for (;;) {
    float values[kPerLane];
    if constexpr (kProbs) {
      // The bits of probabilities have the order of the numbers, and those of anything else, also
      // of -0, are above them.
      const uint32_t top = warp_max(p.max_bits());
      const uint32_t largest = bits_as<uint32_t>(kLargest);
      if (__any_sync(kAllLanes, top > largest || q.max_bits() > largest)) return warp_tile;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = p[j];
      store_linear<kType>(rows.direct, warp_tile, values, bits_as<float>(top));
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = __fmaf_rn(q[j], -rows.draft_scale, values[j]);
    } else {
      if (!__all_sync(kAllLanes, q.max() < INFINITY)) return warp_tile;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const float w = exp2_fast((p[j] - rows.offset) * rows.rate) * rows.scale;
        const float v = exp2_fast((q[j] - rows.draft_offset) * rows.draft_rate);
        values[j] = __fmaf_rn(v, -rows.draft_scale, w);
      }
    }
    const int next = warp_tile + rows.step;
    if (next < rows.whole_tiles) {
      p.load(rows.target + lane_id() * 16, next);
      q.load(rows.draft + lane_id() * 16, next);
    }
    uint32_t top = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      values[j] = fmaxf(values[j], 0.0f);  // NaN becomes 0
      const auto bits = bits_as<uint32_t>(values[j]);
      top = bits > top ? bits : top;
    }
    store_linear<kType>(rows.positive, warp_tile, values, bits_as<float>(warp_max(top)));
    warp_tile = next;
    if (warp_tile >= rows.whole_tiles) return warp_tile;
  }
}

// How many columns of a draft row must be read for the mass of Q beyond the target's vocabulary.
// With a map from tokens to columns it is all of them, because the pass over the target's tokens
// has not read every column and cannot tell whether the row is valid.
inline __device__ int64_t columns_beyond(const DraftDistribution& d, int64_t vocab) {
  if (d.lists_tokens()) return 0;
  if (d.columns != nullptr) return d.row_checked ? 0 : d.row.vocab;
  return d.row.vocab > vocab ? d.row.vocab - vocab : 0;
}

// Stores the sums of Q over the warp tiles of the last `columns_beyond` columns of the draft row.
// `exclude(column, wide, values)` may set some of them to 0 in a warp tile that begins with
// `column`. A warp takes every step-th warp tile from `first` on.
template <class Exclude>
inline __device__ void sum_beyond(int64_t first, int64_t step, const DraftDistribution& d,
                                  int64_t vocab, const TileStats& tile_stats,
                                  const Exclude& exclude) {
  const int64_t size = columns_beyond(d, vocab);
  if (size == 0) return;
  const int64_t begin = d.row.vocab - size;
  const RowView columns = d.row.part(begin, size);
  for (int64_t warp_tile = first; warp_tile < columns.warp_tiles(); warp_tile += step) {
    TileValues tile = call_read_warp_tile(columns, warp_tile);
    float (&values)[kPerLane] = tile.values;
    const float top = d.normalise_all(values);
    exclude(begin + warp_tile * kWarpTile, columns.wide(), values);
    store_positive(tile_stats, warp_tile, values, columns.wide(), 1.0f,
                   __all_sync(kAllLanes, top < INFINITY));
  }
}

// The masses of the warp tiles of values stored. Their sum is NaN if a warp tile was not valid,
// else infinite if its sum was.
inline __device__ WarpTileMasses stored_masses(ThreadBlock& block, const TileStats& tile_stats,
                                               int64_t warp_tiles) {
  const TileRun run(tile_stats, warp_tiles);
  const float max = run.largest(block, tile_stats);
  return WarpTileMasses(block, tile_stats, warp_tiles, run, max, 1.0f, true);
}
inline __device__ double stored_sum(ThreadBlock& block, const TileStats& tile_stats,
                                    int64_t warp_tiles) {
  return stored_masses(block, tile_stats, warp_tiles).sum();
}

// The warp tiles that `sum_beyond` stores.
inline __device__ int64_t tiles_beyond(const DraftDistribution& d, int64_t vocab) {
  return (columns_beyond(d, vocab) + kWarpTile - 1) / kWarpTile;
}

// The mass of Q beyond the target's vocabulary, where `sum` is that of the tiles stored; NaN if the
// row is not valid there. `excluded(id)` leaves a token out of a draft that lists its tokens. For
// the whole block.
template <class Excluded>
inline __device__ double mass_beyond(ThreadBlock& block, const DraftDistribution& d, int64_t vocab,
                                     double sum, const Excluded& excluded) {
  if (d.form == DraftForm::kOneHot) return d.token >= vocab ? 1 : 0;
  if (d.form == DraftForm::kSparse) {
    double mass = 0;
    for (int64_t k = thread_id(); k < d.row.vocab; k += kThreads) {
      const int64_t id = d.id(k);
      if (id >= vocab && !excluded(id)) mass += static_cast<double>(at(d.row, k));
    }
    return block.sum(mass);
  }
  // With a map from tokens to columns the whole row was read, only to validate it; Q has been
  // counted token by token already.
  return d.columns != nullptr && sum >= 0 ? 0 : sum;
}

struct Choice {
  int64_t warp_tile;
  int64_t rest;  // the mass in it before the point drawn
};

// The warp tile in which the running sum of the values stored passes u times their sum.
inline __device__ Choice choose_stored(ThreadBlock& block, const TileStats& tile_stats,
                                       int64_t warp_tiles, double u) {
  Choice out;
  out.warp_tile = stored_masses(block, tile_stats, warp_tiles).choose(block, u, out.rest);
  return out;
}

// Sums of max(cP - Q, 0) and max(Q - cP, 0) for a draft that lists its tokens. P is read at these
// alone, because elsewhere Q is 0. For the whole block.
inline __device__ void sum_residual_of_few(ThreadBlock& block, const DraftDistribution& d,
                                           const RowView& row, const RowStats& stats, double c,
                                           double& positive_out, double& negative_out) {
  const bool one_hot = d.form == DraftForm::kOneHot;
  const int64_t n = one_hot ? 1 : d.row.vocab;
  double positive = 0, negative = 0, covered = 0;
  for (int64_t k = thread_id(); k < n; k += kThreads) {
    const int64_t id = one_hot ? d.token : d.id(k);
    double q = one_hot ? 1 : 0;
    bool again = id < 0;
    for (int64_t j = 0; j < n && !one_hot; ++j) {
      if (d.id(j) != id) continue;
      again |= j < k;
      q += static_cast<double>(at(d.row, j));
    }
    if (again) continue;
    const double p = id < row.vocab ? exp_of(stats.logprob(at(row, id))) : 0;
    covered += p;
    const double gap = c * p - q;
    positive += fmax(gap, 0.0);
    negative += fmax(-gap, 0.0);
  }
  positive = block.sum(positive);
  negative = block.sum(negative);
  covered = block.sum(covered);
  if (thread_id() != 0) return;
  positive_out = positive + c * fmax(0.0, 1 - covered);
  negative_out = negative;
}

}  // namespace specdec::cuda
