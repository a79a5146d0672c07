#pragma once
// Products of rows with panels of packed weights. One source is built once per instruction set.
//
// The order of each sum follows from the number of inputs alone: runs of kRun products, blocks of
// kBlock inputs, then the sum of the blocks, so that the error stays that of a short sum. AMX adds
// one pair of products after the other. So a row's bits do not depend on the rows beside it.
#include <cstddef>
#include <cstdint>

#include "specdec/linear.h"

namespace specdec::cpu {

// More rows are multiplied in groups, whose inputs and sums lie in the second-level cache.
constexpr int64_t kGroupRows = 64;

// The kernels of one dtype, for one group of rows. `rows` is x as a kernel reads it.
struct LinearKernel {
  // Bytes that `read_rows` writes, here of all groups; 0 where a kernel reads x itself.
  int64_t (*rows_bytes)(const PackedLinearParams& p);
  void (*read_rows)(const PackedLinearParams& p, void* rows);
  // Writes y for the outputs of panels [begin, end).
  void (*multiply)(const PackedLinearParams& p, const void* rows, int64_t begin, int64_t end);
};

// Floats of blocks that begin at `from`: `inputs` times those of a panel's outputs.
using UnpackBlocks = void (*)(const char* from, int64_t inputs, float* out);

struct LinearKernels {
  int64_t width;  // outputs of a panel
  UnpackBlocks (*unpack)(WeightFormat format);
  LinearKernel of_dtype[3];
};

}  // namespace specdec::cpu
