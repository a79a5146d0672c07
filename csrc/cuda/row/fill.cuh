#pragma once
// The loop that measures a row: it computes the statistics of each warp tile. Whole tiles of logits
// at aligned addresses have a loop for each dtype, which is where most of the time of `sample` and
// of a verifier is spent; all else goes through `fill_any`. Both compute the same bits.
#include "cuda/row/distribution.cuh"
#include "cuda/row/words.cuh"

namespace specdec::cuda {

// Computes the tile statistics of every `step`-th whole warp tile from `warp_tile` on, and returns
// the first one that it leaves to others.
template <DType kType, bool kAligned>
__forceinline__ __device__ int fill_masses(const void* row, int whole_tiles, int warp_tile,
                                           int step, float rate, int64_t* units, float* maxima) {
  constexpr bool kWide = Words<kType>::kWide;
  // So many bytes are under way for each dtype.
  constexpr int kBuffers = kWide || !kAligned ? 1 : 2;
  using Buffer = std::conditional_t<kAligned, Words<kType>, UnalignedWords<kType>>;
  if (warp_tile >= whole_tiles) return warp_tile;
  const unsigned begin = kAligned ? 0 : reinterpret_cast<uintptr_t>(row) % 16;
  const char* const lane = whole_address(static_cast<const char*>(row) - begin + lane_id() * 16);
  const bool stores = lane_id() == 0;
  // Measures the warp tile that a buffer holds and loads the next one into it.
  const auto fill_one = [&](Buffer& buffer) {
    const Words<kType> words = lane_words(buffer, begin);
    const float top = warp_max(words.max());
    float weights[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) weights[j] = words[j];
    const int next = warp_tile + kBuffers * step;
    if (next < whole_tiles) buffer.load(lane, next);
    weigh_tile(weights, top, rate);
    const int64_t mass = warp_mass(lane_units<run_of(kWide)>(weights));
    if (stores) {
      maxima[warp_tile] = top;
      units[warp_tile] = mass;
    }
    warp_tile += step;
    return warp_tile < whole_tiles;
  };
  Buffer first, second;
  first.load(lane, warp_tile);
  if (kBuffers == 2 && warp_tile + step < whole_tiles) second.load(lane, warp_tile + step);
  while (fill_one(first) && (kBuffers == 1 || fill_one(second))) {
  }
  return warp_tile;
}

// Computes the tile statistics of every `step`-th warp tile from `warp_tile` on.
inline __device__ void fill_any(const RowView& row, const TileStats& tile_stats, Want want,
                                float rate, const GumbelNoise& noise, int64_t warp_tile,
                                int64_t step) {
  for (; warp_tile < row.warp_tiles(); warp_tile += step) {
    float values[kPerLane];
    read_warp_tile(row, warp_tile, values);
    float top = warp_tile_max(values);
    uint64_t best = 0;
    int64_t units = 0;
    if (want == Want::kLinear) {
      units = linear_units(values, row.wide(), top);
    } else if (want == Want::kArgmax) {
      int first = -1;
#pragma unroll
      for (int j = kPerLane - 1; j >= 0; --j) first = values[j] == top ? j : first;
      best = warp_best(first < 0 ? 0 : pack_best(1.0f, place(row.wide(), first)));
    } else if (is_finite(top)) {
      weigh_tile(values, top, rate);
      units = warp_mass(lane_units(values, row.wide()));
      if (want == Want::kGumbel) best = warp_tile_gumbel(values, row.wide(), warp_tile, noise);
    }
    if (lane_id() != 0) continue;
    tile_stats.maxima[warp_tile] = top;
    if (want != Want::kArgmax) tile_stats.units[warp_tile] = units;
    if (want == Want::kGumbel || want == Want::kArgmax) tile_stats.best[warp_tile] = best;
  }
}

// Computes the tile statistics of a row, or of one split of it.
inline __device__ void fill_tile_stats(const BlockGroup& group, const RowView& row,
                                       const TileStats& tile_stats, Want want, float inv_t,
                                       const GumbelNoise& noise, int split = 0, int splits = 1) {
  const float rate = rate_of(inv_t);
  const auto step = static_cast<int>(group.warp_tile_step(splits));
  auto warp_tile = static_cast<int>(group.first_warp_tile(split));
  if (want == Want::kMass && row.read == Read::kLogits) {
    const auto whole_tiles = static_cast<int>(row.vocab / kWarpTile);
    const auto fill = [&](auto type, auto aligned) {
      warp_tile = fill_masses<decltype(type)::value, decltype(aligned)::value>(
          row.data, whole_tiles, warp_tile, step, rate, tile_stats.units, tile_stats.maxima);
    };
    const std::true_type aligned;
    const std::false_type unaligned;
    if (row.dtype == DType::kBFloat16) {
      const DTypeOf<DType::kBFloat16> type;
      row.aligned() ? fill(type, aligned) : fill(type, unaligned);
    } else if (row.dtype == DType::kFloat16) {
      const DTypeOf<DType::kFloat16> type;
      row.aligned() ? fill(type, aligned) : fill(type, unaligned);
    } else if (row.aligned()) {
      fill(DTypeOf<DType::kFloat32>(), aligned);
    }
  }
  if (warp_tile < row.warp_tiles()) {
    fill_any(row, tile_stats, want, rate, noise, warp_tile, step);
  }
}

}  // namespace specdec::cuda
