#pragma once
// What a decoder layer does beside products and attention, on one row. One source is built once per
// instruction set. The order of a sum follows from the size of a row alone.
#include <cstdint>

namespace specdec::cpu {

// By dtype: float32, bfloat16, float16.
struct DecoderLayerKernels {
  // y = weight * (x / sqrt(mean of x^2 + epsilon)), rounded before it is weighted; y may be x.
  void (*normalise[3])(const void* x, const void* weight, void* y, int64_t size, float epsilon);
  // Rotates each of `heads` [size] in place: halves a, b become a cos - b sin and b cos + a sin.
  void (*rotate[3])(void* x, int64_t heads, int64_t size, const void* cos, const void* sin);
  // gate = gate * sigmoid(gate), rounded, * up.
  void (*gate[3])(void* gate, const void* up, int64_t size);
  // y = y + x.
  void (*add[3])(void* y, const void* x, int64_t size);
};

}  // namespace specdec::cpu
