// The kernels of one instruction set, called with pointers to one row.
#include "cpu/forward/decoder_layer_tile.cpp"

static const specdec::cpu::DecoderLayerKernels& kernels = specdec::cpu::decoder_layer_kernels_shim;

extern "C" void normalise(int dtype, const void* x, const void* weight, void* y, int64_t size,
                          float epsilon) {
  kernels.normalise[dtype](x, weight, y, size, epsilon);
}

extern "C" void rotate(int dtype, void* x, int64_t heads, int64_t size, const void* cos,
                       const void* sin) {
  kernels.rotate[dtype](x, heads, size, cos, sin);
}

extern "C" void gate(int dtype, void* gate, const void* up, int64_t size) {
  kernels.gate[dtype](gate, up, size);
}

extern "C" void add(int dtype, void* y, const void* x, int64_t size) {
  kernels.add[dtype](y, x, size);
}
