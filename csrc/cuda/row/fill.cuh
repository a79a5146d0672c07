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
  // Instead of tiles beyond the last one that one is loaded again: a load that may not happen would
  // have to keep the words of the one before it.
  const int last = whole_tiles - 1;
  // Measures the warp tile that a buffer holds and loads the next one into it.
  const auto fill_one = [&](Buffer& buffer) {
    const Words<kType> words = lane_words(buffer, begin);
    const float top = warp_max(words.max());
    float weights[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) weights[j] = words[j];
    const int next = warp_tile + kBuffers * step;
    buffer.load(lane, next < last ? next : last);
    weigh_tile(weights, top, rate);
    const int64_t mass = warp_mass(lane_units<run_of(kWide)>(weights));
    if (stores) {
      maxima[warp_tile] = top;
      units[warp_tile] = mass;
    }
    warp_tile += step;
    return warp_tile <= last;
  };
  Buffer first, second;
  first.load(lane, warp_tile);
  if (kBuffers == 2) second.load(lane, warp_tile + step < last ? warp_tile + step : last);
  while (fill_one(first) && (kBuffers == 1 || fill_one(second))) {
  }
  return warp_tile;
}

// A row whose tile statistics are computed, or one split of it. It lies in shared memory and is
// read again when needed, because the loops need the registers.
struct RowFill {
  RowView row;
  TileStats tile_stats;
  float rate;
  Want want;
  GumbelNoise noise;
  int split, splits;

  // The first warp tile of this warp, and the step to its next one.
  __device__ int first_warp_tile() const { return split * kWarps + warp_id(); }
  __device__ int step() const { return splits * kWarps; }
};

// Computes the tile statistics of the row's warp tiles from `warp_tile` on.
inline SPECDEC_NOINLINE __device__ void fill_any(const RowFill& fill, int warp_tile) {
  for (; warp_tile < fill.row.warp_tiles(); warp_tile += fill.step()) {
    const bool wide = fill.row.wide();
    TileValues tile = call_read_warp_tile(fill.row, warp_tile);
    float (&values)[kPerLane] = tile.values;
    float top = warp_tile_max(values);
    uint64_t best = 0;
    int64_t units = 0;
    if (fill.want == Want::kLinear) {
      units = linear_units(values, wide, top);
    } else if (fill.want == Want::kArgmax) {
      int first = -1;
#pragma unroll
      for (int j = kPerLane - 1; j >= 0; --j) first = values[j] == top ? j : first;
      // The lowest index is the largest distance from the end.
      const auto from_end =
          warp_max(first < 0 ? 0u : static_cast<uint32_t>(kWarpTile - place(wide, first)));
      best = from_end == 0 ? 0 : pack_best(1.0f, kWarpTile - static_cast<int>(from_end));
    } else if (is_finite(top)) {
      weigh_tile(values, top, fill.rate);
      units = warp_mass(lane_units(values, wide));
      if (fill.want == Want::kGumbel) {
        best = warp_tile_gumbel(values, wide, warp_tile, fill.noise);
      }
    }
    if (lane_id() != 0) continue;
    fill.tile_stats.maxima[warp_tile] = top;
    if (fill.want != Want::kArgmax) fill.tile_stats.units[warp_tile] = units;
    if (fill.want == Want::kGumbel || fill.want == Want::kArgmax) {
      fill.tile_stats.best[warp_tile] = best;
    }
  }
}

// Computes the tile statistics of a row, or of one split of it.
inline __device__ void fill_tile_stats(const RowFill& fill) {
  const RowView& row = fill.row;
  const int step = fill.step();
  int warp_tile = fill.first_warp_tile();
  if (fill.want == Want::kMass && row.read == Read::kLogits && row.allowed == nullptr) {
    // The loads of a tile at another address end beyond it, and must not end beyond the row.
    const int64_t loaded = row.vocab - (row.aligned() ? 0 : kBeyondTile);
    const auto whole_tiles = static_cast<int>(loaded / kWarpTile);
    const auto whole = [&](auto type, auto aligned) {
      warp_tile = fill_masses<decltype(type)::value, decltype(aligned)::value>(
          row.data, whole_tiles, warp_tile, step, fill.rate, fill.tile_stats.units,
          fill.tile_stats.maxima);
    };
    with_dtype(row.dtype, [&](auto type) {
      if (row.aligned()) return whole(type, std::true_type());
      if constexpr (decltype(type)::value != DType::kFloat32) whole(type, std::false_type());
    });
  }
  fill_any(fill, warp_tile);
}

}  // namespace specdec::cuda
