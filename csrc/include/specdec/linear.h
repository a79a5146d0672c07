#pragma once
// Linear layers of few rows: y[m, n] = sum over k of x[m, k] w[n, k], + bias[n].
//
// A packed weight consists of panels. Each holds the weights of `width` outputs, so that one step
// of a kernel reads them side by side. bfloat16 weights of two neighbouring inputs lie together,
// which products of pairs need and which halves the work of widening them.
#include "specdec/parallel.h"
#include "specdec/sampling.h"
#include "specdec/weight_blocks.h"

namespace specdec {

// Those of weight_blocks.h hold the blocks of a file instead.
struct PanelLayout {
  int64_t panels, steps, width, inputs;  // [panels, steps, width, inputs of a step]

  PanelLayout(DType dtype, int64_t out_features, int64_t in_features, int64_t panel_width)
      : panels((out_features + panel_width - 1) / panel_width), width(panel_width) {
    inputs = dtype == DType::kBFloat16 ? 2 : 1;
    steps = (in_features + inputs - 1) / inputs;
  }
};

struct PackLinearParams {
  const void* weight;  // [out_features, in_features]
  void* panels;        // as PanelLayout says, zero where the weight has ended
  DType dtype;
  int64_t out_features, in_features;  // at least 1
};

struct PackedWeight {
  const void* panels;  // as PanelLayout says, or as PackBlocksParams says
  WeightFormat format;
  const void* bias;  // [out_features], may be null
  int64_t out_features;
};

struct PackedLinearParams {
  const void* x;  // [rows, in_features]
  PackedWeight weight;
  void* y;      // [rows, out_features]
  DType dtype;  // of all; blocks are rounded to it
  int64_t rows, in_features;
};

namespace cpu {
int64_t panel_width();  // of the instruction set that this process uses
void pack_linear(const PackLinearParams& p, const Parallel& parallel);
void packed_linear(const PackedLinearParams& p, const Parallel& parallel);
}  // namespace cpu

}  // namespace specdec
