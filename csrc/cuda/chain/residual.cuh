#pragma once
// What all ops that verify do with one sequence: its parameters, the positive part of a difference.
#include "cuda/row/draft.cuh"

namespace specdec::cuda {

// The positive part of `sign` times the values of a warp_tile, to a slot.
inline __device__ void store_positive(const TileStats& tile_stats, int64_t warp_tile,
                                      const float (&values)[kPerLane], float sign, bool valid) {
  float w[kPerLane];
  uint32_t best = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    w[j] = fmaxf(sign * values[j], 0.0f);  // 0 of NaN
    const auto bits = bits_as<uint32_t>(w[j]);
    best = bits > best ? bits : best;
  }
  float top = bits_as<float>(warp_max(best));
  const int64_t units = linear_units(w, top);
  if (lane_id() != 0) return;
  tile_stats.maxima[warp_tile] = valid ? top : NAN;
  tile_stats.units[warp_tile] = units;
}

// The sum of what was stored, NaN if some of it was not valid.
inline __device__ double stored_sum(BlockGroup& group, const TileStats& tile_stats,
                                    int64_t warp_tiles) {
  const float max = max_of(group, tile_stats.maxima, warp_tiles);
  return is_finite(max) ? WarpTileMasses(group, tile_stats, warp_tiles, max, 1.0f, true).sum()
                        : NAN;
}

// Columns of a draft row that no token of the target has. With a map, all of it: the scan of the
// target's tokens has not seen the columns without one.
inline __device__ int64_t rest_size(const DraftDistribution& d, int64_t vocab) {
  if (d.few()) return 0;
  if (d.columns != nullptr) return d.checked ? 0 : d.row.vocab;
  return d.row.vocab > vocab ? d.row.vocab - vocab : 0;
}

// Sums of max(cP - Q, 0) and max(Q - cP, 0): of a point mass or a sparse law they need P at its ids
// alone; the rest of P is above Q. For the whole block.
inline __device__ void few_differences(BlockGroup& group, const DraftDistribution& d,
                                       const RowView& row, const RowStats& stats, double c,
                                       double& more_out, double& less_out) {
  const bool point = d.form == DraftForm::kOneHot;
  const int64_t n = point ? 1 : d.row.vocab;
  double more = 0, less = 0, covered = 0;
  for (int64_t k = thread_id(); k < n; k += kThreads) {
    const int64_t id = point ? d.token : d.id(k);
    double q = point ? 1 : 0;
    bool again = id < 0;
    for (int64_t j = 0; j < n && !point; ++j) {
      if (d.id(j) != id) continue;
      again |= j < k;
      q += static_cast<double>(at(d.row, j));
    }
    if (again) continue;
    const double p = id < row.vocab ? exp(stats.logprob(at(row, id))) : 0;
    covered += p;
    const double gap = c * p - q;
    more += fmax(gap, 0.0);
    less += fmax(-gap, 0.0);
  }
  more = group.sum(more);
  less = group.sum(less);
  covered = group.sum(covered);
  if (thread_id() != 0) return;
  more_out = more + c * fmax(0.0, 1 - covered);
  less_out = less;
}

}  // namespace specdec::cuda
