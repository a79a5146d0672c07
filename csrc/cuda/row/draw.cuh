#pragma once
// Draws from one warp tile: Gumbel-max sampling, the inverse CDF.
#include "cuda/row/weights.cuh"
#include "specdec/philox.h"

namespace specdec::cuda {

// Packs a score and its index into an integer that is larger for a better score, and among equals
// for a lower index. Scores are not negative.
inline __device__ uint64_t pack_best(float score, int index) {
  return uint64_t{bits_as<uint32_t>(score)} << 32 | static_cast<uint32_t>(kWarpTile - 1 - index);
}
inline __device__ float score_of(uint64_t packed) {
  return bits_as<float>(static_cast<uint32_t>(packed >> 32));
}
inline __device__ int index_of(uint64_t packed) {
  return kWarpTile - 1 - static_cast<int>(static_cast<uint32_t>(packed));
}

// A word whose place is not known at compile time, without an array in memory.
inline __device__ uint32_t word_at(const Words& words, int place) {
  return place == 0   ? words.word[0]
         : place == 1 ? words.word[1]
         : place == 2 ? words.word[2]
                      : words.word[3];
}

// E = -log1p(-u) with u = (x + 1/2) / 2^32, exponentially distributed; -log(E) is Gumbel noise.
// Each half of the range keeps its relative precision. A small x takes 32 more bits; there
// -log1p(-u) is u to the last bit of a float.
inline __device__ float exponential(uint32_t x, int word, const GumbelNoise& noise,
                                    uint32_t counter) {
  if (x < 256) {
    const uint32_t low = word_at(
        philox(noise.seed, counter, noise.position, noise.stream + uint32_t{kTailStreams}), word);
    return static_cast<float>((x * 0x1p32 + low + 0.5) * 0x1p-64);
  }
  const bool upper = x >> 31;
  const float h = (static_cast<float>(upper ? ~x : x) + 0.5f) * 0x1p-32f;
  return upper ? -logf(h) : -log1pf(-h);
}

// The best score w / E of a warp tile, packed with its index; 0 if nothing has weight. It has the
// same argmax as log(w) + Gumbel noise.
inline __device__ uint64_t warp_tile_gumbel(float (&w)[kPerLane], bool wide, int64_t warp_tile,
                                            const GumbelNoise& noise) {
  uint64_t best = 0;
#pragma unroll 1
  for (int q = 0; q < kQuads; ++q) {
    const int first = first_of_quad(wide, q);
    const auto counter = static_cast<uint32_t>((warp_tile * kWarpTile + first) / 4);
    const Words x = philox(noise.seed, counter, noise.position, noise.stream);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (w[j] > 0) {
        const uint64_t packed =
            pack_best(w[j] / exponential(x.word[j], j, noise, counter), first + j);
        best = packed > best ? packed : best;
      }
    }
    rotate(w);
  }
  return fold_lanes(best, Larger());
}

// Index in the warp tile of the first entry at which the running sum of units passes `target`; else
// of the last one with weight. In every lane. The units of a run of neighbours are those of their
// sum, as in `lane_units`.
inline __device__ int warp_tile_pick(float (&w)[kPerLane], bool wide, int64_t target) {
  const int run = run_of(wide);
  float quads[kQuads];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    quads[q] = (w[q * 4] + w[q * 4 + 1]) + (w[q * 4 + 2] + w[q * 4 + 3]);
  }
  // The first element of the run of this lane in which the sum passes the target, and the sum
  // before it.
  int begin = kPerLane;
  int64_t running = 0, sum_before = 0;
#pragma unroll 1
  for (int first = 0; first < kPerLane; first += run) {
    const int64_t mine = units_of(wide ? quads[0] : quads[0] + quads[1]);
    int64_t upto = mine;
#pragma unroll 1
    for (int step = 1; step < kLanes; step *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, upto, step);
      if (lane_id() >= step) upto += other;
    }
    const int64_t before = running + upto - mine;
    if (before <= target && target < before + mine) {
      begin = first;
      sum_before = before;
    }
    running += __shfl_sync(kAllLanes, upto, kLanes - 1);
    quads[0] = wide ? quads[1] : quads[2];
    quads[1] = wide ? quads[2] : quads[3];
    quads[2] = quads[3];
  }
  // Because of rounding the running sum may stay below the rounded sum of the run: then the last
  // entry with weight is chosen.
  int chosen = -1, last = -1;
  float sum = 0;
#pragma unroll 1
  for (int first = 0; first < kPerLane; first += 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (first + j >= begin + run) break;
      if (w[j] > 0) last = first + j;
      if (first + j < begin) continue;
      sum += w[j];
      if (chosen < 0 && sum_before + units_of(sum) > target) chosen = first + j;
    }
    rotate(w);
  }
  if (begin < kPerLane && chosen < 0) chosen = last;
  const int none = kWarpTile;
  const int mine = chosen < 0 ? none : place(wide, chosen);
  const auto found = static_cast<int>(~warp_max(~static_cast<uint32_t>(mine)));
  if (found < none) return found;
  const int end = last < 0 ? 0 : place(wide, last) + 1;
  return static_cast<int>(warp_max(static_cast<uint32_t>(end))) - 1;
}

}  // namespace specdec::cuda
