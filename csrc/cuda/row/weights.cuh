#pragma once
// Arithmetic on one warp tile: maxima, weights, masses, Gumbel-max sampling, the inverse CDF.
#include "cuda/row/tile.cuh"
#include "specdec/ordered_key.h"
#include "specdec/philox.h"

namespace specdec::cuda {

constexpr float kLargest = 3.402823466e38f;
constexpr float kLog2E = 1.44269504088896341f;

// The larger; NaN if either is.
inline __device__ float max_or_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
#else
  if (a != a || b != b) return NAN;
  return a > b ? a : b;
#endif
}

inline __device__ uint32_t warp_max(uint32_t value) {
#ifdef __CUDA_ARCH__
  return __reduce_max_sync(kAllLanes, value);
#else
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, value, step);
    value = other > value ? other : value;
  }
  return value;
#endif
}

// The largest entry of a warp tile, NaN if one is; in every lane.
inline __device__ float warp_tile_max(const float (&values)[kPerLane]) {
  float best = values[0];
#pragma unroll
  for (int j = 1; j < kPerLane; ++j) best = max_or_nan(best, values[j]);
  return from_ordered_key(warp_max(ordered_key(best)));
}

// 2^x within two units in the last place; 0 where it would be subnormal.
inline __device__ float exp2_fast(float x) {
#ifdef __CUDA_ARCH__
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  const float out = exp2f(x);
  return out < 0x1p-126f ? 0.0f : out;
#endif
}

// exp((l - offset) / T) where l >= threshold, else 0.
struct WeightParams {
  float offset;
  float rate;  // log2(e) / T
  float threshold;

  __device__ float weight(float l) const {
    return l >= threshold ? exp2_fast((l - offset) * rate) : 0.0f;
  }
};

inline __device__ void weigh(float (&values)[kPerLane], const WeightParams& weight_params) {
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) values[j] = weight_params.weight(values[j]);
}

inline __device__ float rate_of(float inverse_temperature) {
  return fminf(inverse_temperature * kLog2E, kLargest);
}

// A mass is a sum of weights. It is an integer number of units, so that it does not depend on the
// order of summation; one unit is 2^-49 of the largest weight. Four neighbours are added as floats
// first; every sum of those is exact.
constexpr float kUnit = 0x1p49f;

inline __device__ int64_t units_of(float weight) { return static_cast<int64_t>(weight * kUnit); }

inline __device__ int64_t quad_units(const float (&w)[kPerLane], int quad) {
  return units_of((w[quad * 4] + w[quad * 4 + 1]) + (w[quad * 4 + 2] + w[quad * 4 + 3]));
}

inline __device__ int64_t lane_units(const float (&w)[kPerLane]) {
  int64_t sum = 0;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) sum += quad_units(w, q);
  return sum;
}

// A power of two near the largest of non-negative weights, and its inverse: both normal floats.
inline __device__ float scale_of(float top) {
  const uint32_t exponent = bits_as<uint32_t>(top) & 0x7f800000u;
  return bits_as<float>(exponent < 0x00800000u   ? 0x00800000u
                        : exponent > 0x7e800000u ? 0x7e800000u
                                                 : exponent);
}
inline __device__ float inverse_scale(float scale) {
  return bits_as<float>(0x7f000000u - bits_as<uint32_t>(scale));
}

inline __device__ int64_t warp_sum(int64_t value) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

// The sum over a warp whose largest weight is 1: at most 2^58, a lane's part at most 2^53. It is
// taken in two limbs, 32 of which add up within 32 bits, even if every weight is a little above 1:
// the specification of ex2.approx does not exclude that.
inline __device__ int64_t warp_mass(int64_t units) {
  constexpr int kLimb = 27;
  const auto low = static_cast<unsigned>(units) & ((1u << kLimb) - 1);
  const uint64_t lows = __reduce_add_sync(kAllLanes, low);
  const uint64_t highs = __reduce_add_sync(kAllLanes, static_cast<unsigned>(units >> kLimb));
  return static_cast<int64_t>((highs << kLimb) + lows);
}

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

inline __device__ uint64_t warp_best(uint64_t value) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, value, step);
    value = other > value ? other : value;
  }
  return value;
}

// E = -log1p(-u) with u = (x + 1/2) / 2^32, exponentially distributed; -log(E) is Gumbel noise.
// Each half of the range keeps its relative precision. A small x takes 32 more bits; there
// -log1p(-u) is u to the last bit of a float.
inline __device__ float exponential(uint32_t x, int word, const GumbelNoise& noise,
                                    uint32_t counter) {
  if (x < 256) {
    const Words more =
        philox(noise.seed, counter, noise.position, noise.stream + uint32_t{kTailStreams});
    const uint32_t low = word == 0   ? more.word[0]
                         : word == 1 ? more.word[1]
                         : word == 2 ? more.word[2]
                                     : more.word[3];
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
  return warp_best(best);
}

// Index in the warp tile of the first entry at which the running sum of units passes `target`; else
// of the last one with weight. In every lane.
inline __device__ int warp_tile_pick(const float (&w)[kPerLane], bool wide, int64_t target) {
  const bool pair = !wide;  // two quads of a lane are neighbours
  int64_t running = 0;
  int chosen = -1, last = -1;  // elements of this lane
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int64_t mine = quad_units(w, q);
    const int64_t whole = pair ? mine + quad_units(w, q ^ 1) : mine;
    int64_t upto = whole;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, upto, step);
      if (lane_id() >= step) upto += other;
    }
    const int64_t all = __shfl_sync(kAllLanes, upto, kLanes - 1);
    const int64_t before = running + upto - (pair && q % 2 ? mine : whole);
    const bool here = before <= target && target < before + mine;
    float sum = 0;
#pragma unroll
    for (int j = q * 4; j < q * 4 + 4; ++j) {
      sum += w[j];
      if (w[j] > 0) last = j;
      if (here && chosen < 0 && before + units_of(sum) > target) chosen = j;
    }
    // Because of rounding the running sum of the four may stay below their rounded sum.
    if (here && chosen < 0) chosen = last;
    if (!pair || q % 2) running += all;
  }
  const int none = kWarpTile;
  const int mine = chosen < 0 ? none : place(wide, chosen);
  const auto found = static_cast<int>(~warp_max(~static_cast<uint32_t>(mine)));
  if (found < none) return found;
  const int end = last < 0 ? 0 : place(wide, last) + 1;
  return static_cast<int>(warp_max(static_cast<uint32_t>(end))) - 1;
}

}  // namespace specdec::cuda
