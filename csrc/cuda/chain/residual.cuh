#pragma once
// The residual max(cP - lQ, 0) of a row, not normalised, for chains and trees; c is the factor of
// P in rules block and traversal, l the lenience; each is 1 for other rules. It is summed by warp
// tile, and the warp tile that is drawn from is computed again: the values are never stored.
#include "cuda/chain/target.cuh"

namespace specdec::cuda {

// Stores the sum of the positive part of `sign` times the values of a warp tile.
inline __device__ void store_positive(const TileStats& tile_stats, int64_t warp_tile,
                                      const float (&values)[kPerLane], float sign, bool valid) {
  float w[kPerLane];
  uint32_t best = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    w[j] = fmaxf(sign * values[j], 0.0f);  // NaN becomes 0
    const auto bits = bits_as<uint32_t>(w[j]);
    best = bits > best ? bits : best;
  }
  float top = bits_as<float>(warp_max(best));
  const int64_t units = linear_units(w, top);
  if (lane_id() != 0) return;
  tile_stats.maxima[warp_tile] = valid ? top : NAN;
  tile_stats.units[warp_tile] = units;
}

// The sum over the row of the values stored; NaN if a warp tile was not valid.
inline __device__ double stored_sum(BlockGroup& group, const TileStats& tile_stats,
                                    int64_t warp_tiles) {
  const float max = max_of(group, tile_stats.maxima, warp_tiles);
  return is_finite(max) ? WarpTileMasses(group, tile_stats, warp_tiles, max, 1.0f, true).sum()
                        : NAN;
}

// How many columns of a draft row must be read for the mass of Q beyond the target's vocabulary.
// With a map from tokens to columns it is all of them, because the pass over the target's tokens
// has not read every column and cannot tell whether the row is valid.
inline __device__ int64_t columns_beyond(const DraftDistribution& d, int64_t vocab) {
  if (d.lists_tokens()) return 0;
  if (d.columns != nullptr) return d.row_checked ? 0 : d.row.vocab;
  return d.row.vocab > vocab ? d.row.vocab - vocab : 0;
}

// Sums of max(cP - Q, 0) and max(Q - cP, 0) for a draft that lists its tokens. P is read at these
// alone, because elsewhere Q is 0. For the whole block.
inline __device__ void sum_residual_of_few(BlockGroup& group, const DraftDistribution& d,
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
    const double p = id < row.vocab ? exp(stats.logprob(at(row, id))) : 0;
    covered += p;
    const double gap = c * p - q;
    positive += fmax(gap, 0.0);
    negative += fmax(-gap, 0.0);
  }
  positive = group.sum(positive);
  negative = group.sum(negative);
  covered = group.sum(covered);
  if (thread_id() != 0) return;
  positive_out = positive + c * fmax(0.0, 1 - covered);
  negative_out = negative;
}

}  // namespace specdec::cuda
