// The kernels of one instruction set, called with pointers.
#include <memory>

#include "cpu/forward/linear_tile.cpp"

extern "C" void packed_linear(const void* x, const void* panels, const void* bias, void* y,
                              int dtype, int format, int64_t rows, int64_t in_features,
                              int64_t out_features, int64_t begin, int64_t end) {
  using namespace specdec;
  const PackedWeight weight = {panels, static_cast<WeightFormat>(format), bias, out_features};
  const PackedLinearParams p = {x, weight, y, static_cast<DType>(dtype), rows, in_features};
  const cpu::LinearKernel& kernel = cpu::linear_kernels_shim.of_dtype[dtype];
  const int64_t bytes = kernel.rows_bytes(p);
  std::unique_ptr<char[]> read(new char[static_cast<size_t>(bytes)]);
  if (bytes > 0) kernel.read_rows(p, read.get());
  kernel.multiply(p, bytes > 0 ? read.get() : x, begin, end);
}
