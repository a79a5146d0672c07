#pragma once
// Arithmetic on one warp tile: maxima, weights, masses.
#include "cuda/row/tile.cuh"
#include "specdec/ordered_key.h"

namespace specdec::cuda {

constexpr float kLargest = 3.402823466e38f;
constexpr float kLog2E = 1.44269504088896341f;

inline __device__ bool is_finite(float x) { return x >= -kLargest && x <= kLargest; }

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

// The same for the halves of two words, each a pair of 16-bit floats.
template <DType kType>
inline __device__ uint32_t max_of_pairs(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t out;
  if constexpr (kType == DType::kBFloat16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  }
  return out;
#else
  constexpr uint32_t kNaN = kType == DType::kBFloat16 ? 0x7fc0 : 0x7e00;
  uint32_t out = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const uint32_t x = a >> shift & 0xffffu, y = b >> shift & 0xffffu;
    const float f = from_bits<kType>(x), g = from_bits<kType>(y);
    const uint32_t best = f != f || g != g ? kNaN : f > g ? x : y;
    out |= best << shift;
  }
  return out;
#endif
}

// The largest of a warp, NaN if one is; in every lane.
inline __device__ float warp_max(float value) {
  return from_ordered_key(warp_max(ordered_bits(value)));
}

// The largest entry of a warp tile, NaN if one is; in every lane.
inline __device__ float warp_tile_max(const float (&values)[kPerLane]) {
  float best = values[0];
#pragma unroll
  for (int j = 1; j < kPerLane; ++j) best = max_or_nan(best, values[j]);
  return warp_max(best);
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

// The weights of a warp tile with the maximum `top` are 2^(l * rate - offset), one fused
// multiply-add each. The offset is the integer next to top * rate, so that `top` itself weighs 1
// within a factor of 2^.5, and the weights of two tiles of a row differ by a power of two. As a
// float it is exact up to 2^21.
constexpr float kToInteger = 0x1.8p23f;  // a float that it is added to is rounded to an integer

inline __device__ float offset_of(float top, float rate) {
  return __fmaf_rn(top, rate, kToInteger) - kToInteger;
}
inline __device__ bool fuses(float offset) { return fabsf(offset) <= 0x1p21f; }

// top * rate as an integer, which is the sum of two floats, and what it is above that integer. A
// larger offset than the one above is found from the product and its rounding error.
struct TileOffset {
  float whole, more;
  float above;  // the binary logarithm of the weight of `top`
};
inline __device__ TileOffset tile_offset(float top, float rate) {
  const float offset = offset_of(top, rate);
  if (fuses(offset)) return {offset, 0.0f, __fmaf_rn(top, rate, -offset)};
  const float product = top * rate, whole = rintf(product);
  const float rest = (product - whole) + __fmaf_rn(top, rate, -product), more = rintf(rest);
  // Where the product is infinite, only entries equal to `top` have weight.
  return {whole, more, rest - more == rest - more ? rest - more : 0.0f};
}

// The weights of a warp tile with the maximum `top` are 2^tile_shift too large beside those of one
// with the maximum `max` of the row.
constexpr int kMostShift = 512;
inline __device__ int tile_shift(float top, float rate, float max) {
  if (top == max) return 0;
  const TileOffset own = tile_offset(top, rate), largest = tile_offset(max, rate);
  const float shift = (largest.whole - own.whole) + (largest.more - own.more);
  return shift < kMostShift ? static_cast<int>(shift) : kMostShift;
}

// Turns the entries of a warp tile into weights relative to their maximum; into 0 below the
// threshold, and if the maximum is not finite.
inline __device__ void weigh_tile(float (&values)[kPerLane], float top, float rate,
                                  float threshold = -INFINITY) {
  float offset = offset_of(top, rate);
  if (threshold > -INFINITY) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      values[j] = values[j] >= threshold ? values[j] : -INFINITY;
    }
  }
  if (!fuses(offset)) {
    const bool finite = is_finite(top);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) values[j] = finite ? values[j] - top : -INFINITY;
    offset = -tile_offset(top, rate).above;
  }
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    values[j] = exp2_fast(__fmaf_rn(values[j], rate, -offset));
  }
}

// The weight of one entry, as `weigh_tile` gives it.
inline __device__ float tile_weight(float l, float top, float rate) {
  const float offset = offset_of(top, rate);
  return fuses(offset) ? exp2_fast(__fmaf_rn(l, rate, -offset))
                       : exp2_fast(__fmaf_rn(l - top, rate, tile_offset(top, rate).above));
}

// A mass is a sum of weights. It is an integer number of units, so that it does not depend on the
// order of summation; one unit is a weight of 2^-48. The neighbours that a lane holds,
// see `run_of`, are added as floats first; every sum of those is exact.
constexpr int kUnitBits = 48;
constexpr float kUnit = 0x1p48f;

inline __device__ int64_t units_of(float weight) { return static_cast<int64_t>(weight * kUnit); }

// The sum of run i of kRun neighbours.
template <int kRun>
inline __device__ int64_t run_units(const float (&w)[kPerLane], int i, float inverse_scale = 1) {
  float pairs[kRun / 2];
#pragma unroll
  for (int j = 0; j < kRun / 2; ++j) pairs[j] = w[i * kRun + 2 * j] + w[i * kRun + 2 * j + 1];
  const float first = pairs[0] + pairs[1];
  const float sum = kRun == 4 ? first : first + (pairs[kRun / 2 - 2] + pairs[kRun / 2 - 1]);
  return units_of(sum * inverse_scale);
}

template <int kRun>
inline __device__ int64_t lane_units(const float (&w)[kPerLane], float inverse_scale = 1) {
  int64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane / kRun; ++i) sum += run_units<kRun>(w, i, inverse_scale);
  return sum;
}
inline __device__ int64_t lane_units(const float (&w)[kPerLane], bool wide,
                                     float inverse_scale = 1) {
  return wide ? lane_units<run_of(true)>(w, inverse_scale)
              : lane_units<run_of(false)>(w, inverse_scale);
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

// The sum over a warp of non-negative weights below 4: at most 2^59, a lane's part below 2^54. It
// is taken in two limbs, 32 of which add up within 32 bits.
inline __device__ int64_t warp_mass(int64_t units) {
  constexpr int kLimb = 27;
  const auto low = static_cast<unsigned>(units) & ((1u << kLimb) - 1);
  const uint64_t lows = __reduce_add_sync(kAllLanes, low);
  const uint64_t highs = __reduce_add_sync(kAllLanes, static_cast<unsigned>(units >> kLimb));
  return static_cast<int64_t>((highs << kLimb) + lows);
}

}  // namespace specdec::cuda
