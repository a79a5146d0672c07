#pragma once
// A weight as a GGUF file stores it: blocks of 32 or 256 inputs of one output, with a scale.
#include <cstdint>

#include "specdec/parallel.h"

namespace specdec {

// In the order of FORMATS in specdec_kernels/arguments/weight_blocks.py, behind floats.
enum class WeightFormat : int32_t {
  kFloats,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K
};
constexpr WeightFormat kLastFormat = WeightFormat::kQ6_K;

// A block has a scale in float16, then a minimum. The weights are scale * (q - bias) + minimum.
// Where it has scales of its parts, integers of 8 bits, the scale and the minimum are multiplied by
// those of the part, and the minimum is subtracted.
struct BlockFormat {
  int64_t inputs, scales, bits;  // scales: of parts; bits: of q
  bool has_minimum;
  int bias;
  int64_t file_bytes;  // of one output; the scales of parts with minima take 6 bits in a file

  // Of one output in a panel, where a block of `width` outputs has side by side: scales, minima,
  // scales and minima of parts, then q. Its lowest 4 bits come first, 8 inputs in a word of 32
  // bits; 8-bit q are bytes.
  constexpr int64_t bytes() const {
    return (2 + scales) * (has_minimum ? 2 : 1) + inputs * bits / 8;
  }
};

constexpr BlockFormat block_format(WeightFormat format) {
  constexpr BlockFormat kFormats[] = {
      {1, 0, 0, false, 0, 0},    {32, 0, 4, false, 8, 18},  {32, 0, 4, true, 0, 20},
      {32, 0, 5, false, 16, 22}, {32, 0, 5, true, 0, 24},   {32, 0, 8, false, 0, 34},
      {256, 8, 4, true, 0, 144}, {256, 8, 5, true, 0, 176}, {256, 16, 6, false, 32, 210}};
  return kFormats[static_cast<int>(format)];
}

struct PackBlocksParams {
  const void* blocks;  // [out_features, in_features / inputs of a block, file_bytes]
  void* panels;        // [panels, blocks of a row, width * bytes], zero where the weight has ended
  WeightFormat format;
  int64_t out_features, in_features;
};

struct UnpackBlocksParams {
  const void* panels;  // as in PackBlocksParams
  float* weight;       // [out_features, in_features]
  WeightFormat format;
  int64_t out_features, in_features;
};

namespace cpu {
void pack_blocks(const PackBlocksParams& p, const Parallel& parallel);
void unpack_blocks(const UnpackBlocksParams& p, const Parallel& parallel);
}  // namespace cpu

}  // namespace specdec
