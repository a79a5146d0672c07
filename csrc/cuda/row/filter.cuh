#pragma once
// The smallest logit that survives top-k, then top-p among the survivors, then min-p; ties survive.
// Selection on ordered keys is exact: each pass splits an interval of keys into 2048 bins.
#include "cuda/row/distribution.cuh"

namespace specdec::cuda {

// Adds up the histograms of all blocks: each block adds one slice of the bins, then all copy them.
inline __device__ void merge_bins(const BlockGroup& group) {
  unsigned long long* const bins = shared_memory()->bins;
  group.sync();
  if (group.size() == 1) return;
  const unsigned slice = (kBins + group.size() - 1) / group.size();
  const unsigned begin = group.rank() * slice, end = begin + slice < kBins ? begin + slice : kBins;
  for (unsigned bin = begin + thread_id(); bin < end; bin += kThreads) {
    uint64_t sum = 0;
    for (unsigned r = 0; r < group.size(); ++r) sum += group.remote(bins, r)[bin];
    bins[bin] = sum;
  }
  group.sync();
  for (unsigned bin = thread_id(); bin < kBins; bin += kThreads) {
    const unsigned owner = bin / slice;
    if (owner != group.rank()) bins[bin] = group.remote(bins, owner)[bin];
  }
  group.sync();
}

// The bin in which the running sum from the top reaches `need`, which is at most the sum of all.
// `need` becomes the part that this bin has to supply.
inline __device__ int reach(BlockGroup& group, int64_t& need) {
  constexpr int kRun = kBins / kThreads;
  const unsigned long long* const bins = shared_memory()->bins;
  const int top = kBins - 1 - static_cast<int>(thread_id()) * kRun;
  int64_t mine = 0, all;
  for (int i = 0; i < kRun; ++i) mine += static_cast<int64_t>(bins[top - i]);
  int64_t running = group.sum_before(mine, all);
  if (running < need && need <= running + mine) {
    int bin = top;
    for (; running + static_cast<int64_t>(bins[bin]) < need; --bin)
      running += static_cast<int64_t>(bins[bin]);
    group.shared->broadcast[0] = bin;
    group.shared->broadcast[1] = need - running;
  }
  __syncthreads();
  need = group.shared->broadcast[1];
  const auto bin = static_cast<int>(group.shared->broadcast[0]);
  __syncthreads();
  return bin;
}

enum class Stage : int32_t { kFloor, kTopK, kTopP };

// Finds the largest key such that the entries at and above it weigh enough.
class Selection {
 public:
  __device__ Selection(BlockGroup& group, const RowView& row, const TileStats& tile_stats,
                       const WeightParams& weight_params)
      : group_(group), row_(row), tile_stats_(tile_stats), weight_params_(weight_params) {}

  // The key lies in [low, high]. `need` is a number of entries, or units of mass; if it is 0,
  // `share` of the mass from low on is needed.
  __device__ uint32_t select(Stage stage, uint32_t low, uint32_t high, int64_t need, double share) {
    unsigned long long* const bins = shared_memory()->bins;
    stage_ = stage;
    for (bool first = true; low < high; first = false) {
      const int width = 32 - __clz(static_cast<int>(high - low));
      shift_ = width > 11 ? width - 11 : 0;
      low_ = low;
      high_ = high;
      for (int i = thread_id(); i < kBins; i += kThreads) bins[i] = 0;
      __syncthreads();
      count();
      if (stage == Stage::kFloor) {
        __syncthreads();
      } else {
        merge_bins(group_);
      }
      if (first) {
        int64_t mine = 0;
        for (int i = thread_id(); i < kBins; i += kThreads) mine += static_cast<int64_t>(bins[i]);
        const int64_t all = group_.sum(mine);
        if (need == 0) need = static_cast<int64_t>(ceil(share * static_cast<double>(all)));
        // Rounding may leave a need just unreached: then every entry seen survives.
        need = need > all ? all : need;
      }
      const auto bin = static_cast<uint32_t>(reach(group_, need));
      low += bin << shift_;
      const uint32_t last = low + ((1u << shift_) - 1);
      high = last < high ? last : high;
    }
    return low;
  }

  // Mass units of the largest weight: the sum over the row stays below 2^63.
  __device__ float unit() const {
    const int bits = 62 - ceil_log2(row_.vocab);
    return static_cast<float>(int64_t{1} << (bits < 50 ? bits : 50));
  }

 private:
  __device__ void add(uint32_t key) const {
    if (key < low_ || key > high_) return;
    // A shared atomic of 64 bits is a loop on the device, one of 32 bits is not.
    auto* const halves =
        reinterpret_cast<unsigned*>(shared_memory()->bins + ((key - low_) >> shift_));
    if (stage_ != Stage::kTopP) {
      atomicAdd(halves, 1u);
      return;
    }
    const auto mass = static_cast<uint64_t>(weight_params_.weight(from_ordered_key(key)) * unit());
    const auto low = static_cast<unsigned>(mass);
    const unsigned before = atomicAdd(halves, low);
    const unsigned high = static_cast<unsigned>(mass >> 32) + (before + low < before ? 1 : 0);
    if (high != 0) atomicAdd(halves + 1, high);
  }

  __device__ void count() {
    if (stage_ == Stage::kFloor) {
      // Every block counts all maxima by itself.
      const int64_t warp_tiles = row_.warp_tiles();
      for (int64_t i = thread_id(); i < warp_tiles; i += kThreads)
        add(ordered_key(tile_stats_.maxima[i]));
      return;
    }
    Shared& s = *shared_memory();
    // The keys that one pass over the row has seen are kept if they fit; a narrower interval is
    // counted from them.
    if (kept_low_ <= low_ && high_ <= kept_high_ && s.num_candidates <= kCandidates) {
      for (uint32_t i = thread_id(); i < s.num_candidates; i += kThreads) add(s.candidates[i]);
      return;
    }
    __syncthreads();  // every thread has read the old number
    if (thread_id() == 0) s.num_candidates = 0;
    __syncthreads();
    kept_low_ = low_;
    kept_high_ = high_;
    read_row();
  }

  __device__ void read_row() const {
    Shared& s = *shared_memory();
    const int64_t warp_tiles = row_.warp_tiles(), step = group_.warp_tile_step(1);
    for (int64_t warp_tile = group_.first_warp_tile(0); warp_tile < warp_tiles; warp_tile += step) {
      if (ordered_key(tile_stats_.maxima[warp_tile]) < low_) continue;
      TileValues tile = call_read_warp_tile<AnyRead>(row_, warp_tile);
      float (&values)[kPerLane] = tile.values;
      // Entries beyond the end have the lowest key, which changes no answer.
#pragma unroll 1
      for (int q = 0; q < kQuads; ++q) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t key = ordered_key(values[j]);
          if (key < low_ || key > high_) continue;
          const uint32_t at = atomicAdd(&s.num_candidates, 1u);
          if (at < kCandidates) s.candidates[at] = key;
          add(key);
        }
        rotate(values);
      }
    }
  }

  BlockGroup& group_;
  const RowView& row_;
  const TileStats& tile_stats_;
  const WeightParams weight_params_;
  Stage stage_ = Stage::kFloor;
  uint32_t low_ = 0, high_ = 0, kept_low_ = ~0u, kept_high_ = 0;
  int shift_ = 0;
};

// Computes the masses again for the survivors alone. Warp tiles without any are not read.
inline __device__ void filter_tile_stats(const BlockGroup& group, const RowView& row,
                                         const TileStats& tile_stats, Want want,
                                         const RowStats& stats, float threshold,
                                         const GumbelNoise& noise) {
  for (auto warp_tile = static_cast<int>(group.first_warp_tile(0)); warp_tile < row.warp_tiles();
       warp_tile += static_cast<int>(group.warp_tile_step(1))) {
    if (!(tile_stats.maxima[warp_tile] >= threshold)) {
      if (lane_id() != 0) continue;
      tile_stats.units[warp_tile] = 0;
      if (want == Want::kGumbel) tile_stats.best[warp_tile] = 0;
      continue;
    }
    TileValues tile = call_read_warp_tile<AnyRead>(row, warp_tile);
    weigh_tile(tile.values, tile_stats.maxima[warp_tile], rate_of(stats.inv_t), threshold);
    const int64_t units = warp_mass(lane_units(tile.values, row.wide()));
    if (lane_id() == 0) tile_stats.units[warp_tile] = units;
    if (want != Want::kGumbel) continue;
    const uint64_t best = warp_tile_gumbel(tile.values, row.wide(), warp_tile, noise);
    if (lane_id() == 0) tile_stats.best[warp_tile] = best;
  }
}

// Returns the threshold. The tile statistics hold the masses of all entries, afterwards those of
// the survivors.
inline __device__ float filter_row(BlockGroup& group, const RowView& row,
                                   const TileStats& tile_stats, const SequenceParams& params,
                                   Want want, const GumbelNoise& noise, const RowStats& stats) {
  const uint32_t high = ordered_key(stats.max);
  uint32_t low = ordered_key(-INFINITY);
  Selection selection(group, row, tile_stats, {stats.max, rate_of(stats.inv_t), -INFINITY});
  const bool top_k = params.top_k > 0 && params.top_k < row.vocab;
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    const auto stage = static_cast<Stage>(i);
    int64_t need = params.top_k;
    if (stage == Stage::kTopP) {
      if (!(params.top_p < 1)) continue;
      need = 0;
      if (low == ordered_key(-INFINITY)) {
        // Entries under (1-p)/V of the largest weight hold less than 1-p of the mass together.
        const double share = (1.0 - params.top_p) / static_cast<double>(row.vocab);
        const double cut = stats.max + params.temperature * log_of(share);
        low = ordered_key(fmaxf(static_cast<float>(cut), -kLargest));
        const int64_t warp_tiles = row.warp_tiles();
        const TileRun run(tile_stats, warp_tiles);
        const WarpTileMasses masses(group, tile_stats, warp_tiles, run, stats.max, stats.inv_t);
        // The bins hold weights relative to that of the maximum.
        const double sum =
            masses.sum() * exp2_of(-double{tile_offset(stats.max, rate_of(stats.inv_t)).above});
        need = static_cast<int64_t>(ceil(params.top_p * sum * selection.unit()));
      }
    } else if (!top_k || (stage == Stage::kFloor && params.top_k > row.warp_tiles())) {
      // The k-th largest tile maximum is a lower bound: at least k entries reach it.
      continue;
    }
    low = selection.select(stage, low, high, need, params.top_p);
  }
  const float keep = from_ordered_key(low);
  const float threshold = fmaxf(keep, min_p_threshold(stats.max, params.temperature, params.min_p));
  group.sync();
  filter_tile_stats(group, row, tile_stats, want, stats, threshold, noise);
  group.sync();
  return threshold;
}

// Row statistics from tile statistics, of which `run` was loaded. `token` becomes the choice of a
// one-hot distribution or of Gumbel-max sampling, else -1.
inline __device__ RowStats read_row_stats(BlockGroup& group, const RowView& row,
                                          const TileStats& tile_stats, TileRun run,
                                          const SequenceParams& params, bool filtered, Want want,
                                          const GumbelNoise& noise, int64_t& token) {
  const int64_t warp_tiles = row.warp_tiles();
  RowStats stats = row_stats_of(group, tile_stats, run, params.temperature);
  // Probabilities that are all 0 are not valid either.
  if (stats.one_hot && row.read == Read::kProbs) stats.valid &= stats.max > 0;
  token = -1;
  if (!stats.valid) return stats;
  if (stats.one_hot) {
    token = argmax(group, tile_stats, warp_tiles, stats.max);
    return stats;
  }
  if (filtered) {
    stats.threshold = filter_row(group, row, tile_stats, params, want, noise, stats);
    run = TileRun(tile_stats, warp_tiles);
  }
  stats.direct = want == Want::kLinear;
  const WarpTileMasses masses(group, tile_stats, warp_tiles, run, stats.max, stats.inv_t,
                              stats.direct);
  if (want == Want::kGumbel) token = gumbel_winner(group, tile_stats, warp_tiles, stats);
  stats.valid = masses.any();
  stats.log_sum = masses.log_sum();
  return stats;
}

}  // namespace specdec::cuda
