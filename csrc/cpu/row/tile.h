#pragma once
// Arithmetic on one tile of a row: at most kTile floats, which fit in the first-level cache. One
// source is built once per instruction set. Every build adds in the same order, and AVX2 and
// AVX-512 agree bit for bit (the plain build has no fused multiply-add).
#include <cstdint>

#include "specdec/noise.h"
#include "specdec/sampling.h"

namespace specdec::cpu {

constexpr int64_t kStrip = 64;    // entries that share one maximum, see TileKernels::peak
constexpr int kRadixBins = 2048;  // 11 bits of the ordered key at a time

constexpr float kSmallestExponent = -87.0f;  // below it exp is 0

struct Peak {
  float max;
  bool nan;
};

struct Best {
  float score;
  int64_t index;  // -1: no entry survives
};

// The weight of a logit l is exp((l - offset) * inv_t) * scale if l >= threshold, else 0.
struct WeightParams {
  float offset;
  float inv_t;
  float threshold;
  float scale;
};

// The smallest logit whose weight is not 0: the threshold, or the logit below which the exponential
// is taken as 0.
float weight_floor(const WeightParams& weight_params);

struct Overlap {
  float sum;    // of min(q, t * p)
  float slope;  // its derivative by t
};

struct Histogram {
  uint32_t low, high;  // ordered keys, both inclusive
  int shift;
  uint32_t mask;
  uint32_t counts[kRadixBins];
  double masses[kRadixBins];
};

struct TileKernels {
  const char* isa;
  void (*from_bfloat16)(const uint16_t* in, int64_t n, float* out);
  void (*from_float16)(const uint16_t* in, int64_t n, float* out);
  void (*log)(const float* in, int64_t n, float* out);
  // Entry i where bit i of `words` is set, else `rest`. `out` may be `in`.
  void (*keep_allowed)(const float* in, int64_t n, const uint32_t* words, float rest, float* out);
  // Writes the maximum of each kStrip entries to `strip_maxima`, which may be null.
  Peak (*peak)(const float* tile, int64_t n, float* strip_maxima);
  float (*sum_exp)(const float* tile, int64_t n,
                   const WeightParams& weight_params);  // as if scale were 1
  void (*weights)(const float* tile, int64_t n, const WeightParams& weight_params, float* out);
  void (*subtract)(float* p, const float* q, int64_t n);  // p = max(p - q, 0)
  float (*sum)(const float* tile, int64_t n);
  bool (*is_distribution)(const float* tile, int64_t n);  // every entry finite and not negative
  // The first index at which the sum, starting from prefix, passes target; else the last one with
  // weight; else -1.
  int64_t (*pick)(const float* weights, int64_t n, double prefix, double target);
  int64_t (*count)(const float* values, int64_t n, float floor);  // values >= floor
  float (*mass)(const float* values, const float* weights, int64_t n,
                float floor);  // weights of these
  // Copies the entries >= floor in order, and their ids, of which the tile's first is `first`.
  int64_t (*gather)(const float* tile, int64_t n, int64_t first, float floor, float* values,
                    int32_t* ids);
  // The best score log P + G of the tile, if it is above the floor.
  Best (*gumbel)(const float* tile, int64_t n, int64_t first_token,
                 const WeightParams& weight_params, const GumbelNoise& noise, float floor);
  // The same for scattered tokens; Best::index is into values.
  Best (*gumbel_among)(const float* values, const int32_t* ids, int64_t n,
                       const WeightParams& weight_params, const GumbelNoise& noise);
  Overlap (*overlap)(const float* p, const float* q, int64_t n, float t);
  void (*histogram)(const float* tile, int64_t n, const WeightParams& weight_params, Histogram& h);
};

// The widest instruction set this processor runs.
const TileKernels& tile_kernels();

}  // namespace specdec::cpu
