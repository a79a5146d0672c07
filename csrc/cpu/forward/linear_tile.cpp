// Compiled once per instruction set (SPECDEC_ISA). Nothing here may be an inline function of a
// shared header: the linker would keep one build of it for all processors.
#include "cpu/forward/linear_tile.h"

#include "cpu/forward/linear_vector.h"

#define SPECDEC_CAT_(a, b) a##b
#define SPECDEC_CAT(a, b) SPECDEC_CAT_(a, b)

namespace specdec::cpu {
namespace {

constexpr int64_t kRun = 16;     // inputs whose products are summed in registers
constexpr int64_t kBlock = 256;  // inputs whose weights stay in the first-level cache

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// What a kernel knows of a dtype. A step is what a panel holds for kInputs inputs side by side, and
// each step is added in kParts products: `weights` returns those of register r for one of them, and
// `add` adds their product with the inputs at x.
struct Float32 {
  using Element = float;
  using Row = float;
  static constexpr int kInputs = 1, kParts = 1;

  static V widen(const float* p) { return load<V>(p); }
  static void narrow(V v, float* out) { store(out, v); }
  static V weights(const float* step, int, int r) { return load<V>(step + r * kLanes); }
  static V add(V sum, V weights, const float* x) {
    return multiply_add(weights, every_lane(*x), sum);
  }
};

struct Float16 {
  using Element = uint16_t;
  using Row = float;
  static constexpr int kInputs = 1, kParts = 1;

  static V widen(const uint16_t* p) { return from_float16(p); }
  static void narrow(V v, uint16_t* out) { to_float16(v, out); }
  static V weights(const uint16_t* step, int, int r) { return from_float16(step + r * kLanes); }
  static V add(V sum, V weights, const float* x) { return Float32::add(sum, weights, x); }
};

struct BFloat16 {
  using Element = uint16_t;
  using Row = float;
  static constexpr int kInputs = 2, kParts = 2;

  static V widen(const uint16_t* p) { return from_bfloat16(p); }
  static void narrow(V v, uint16_t* out) { to_bfloat16(v, out); }
  static V weights(const uint16_t* step, int part, int r) {
    const U pairs = load<U>(step + 2 * r * kLanes);
    return part == 0 ? (V)(pairs << 16) : (V)(pairs & 0xffff0000u);
  }
  static V add(V sum, V weights, const float* x) { return Float32::add(sum, weights, x); }
};

// The numbers of a row of x; its end is zero where the last step has inputs that x lacks.
template <class Type>
int64_t row_size(const PackedLinearParams& p) {
  return (p.in_features + Type::kInputs - 1) / Type::kInputs * Type::kInputs;
}

template <class Type>
int64_t rows_bytes(const PackedLinearParams& p) {
  return p.rows * row_size<Type>(p) * static_cast<int64_t>(sizeof(float));
}

template <class Type>
void read_rows(const PackedLinearParams& p, void* rows) {
  const auto* x = static_cast<const typename Type::Element*>(p.x);
  auto* out = static_cast<float*>(rows);
  const int64_t size = row_size<Type>(p);
  for (int64_t m = 0; m < p.rows; ++m, x += p.in_features, out += size) {
    int64_t k = 0;
    for (; k + kLanes <= p.in_features; k += kLanes) store(out + k, Type::widen(x + k));
    typename Type::Element last[kLanes] = {};
    float wide[kLanes];
    __builtin_memcpy(last, x + k, static_cast<size_t>(p.in_features - k) * sizeof *x);
    store(wide, Type::widen(last));
    __builtin_memcpy(out + k, wide, static_cast<size_t>(size - k) * sizeof *out);
  }
}

// The block after the one that is multiplied comes into the cache meanwhile, a part of it in each
// pass over the block: the processor's own prefetching ends with a page and between two passes.
struct NextBlock {
  const char* begin;
  int64_t bytes;  // for each input

  NextBlock(const void* block, int64_t inputs, int64_t bytes_of_input, int64_t passes)
      : begin(static_cast<const char*>(block) + inputs * bytes_of_input),
        bytes(bytes_of_input / passes) {}
};

// Adds to `totals` the products of M rows with `inputs` inputs of one panel, at most a block.
template <class Type, int M>
__attribute__((noinline)) void multiply_rows(const typename Type::Row* x, int64_t stride,
                                             const typename Type::Element* w, int64_t inputs,
                                             const NextBlock& next, V (*totals)[2]) {
  const char* ahead = next.begin;
  const int64_t ahead_step = next.bytes * Type::kInputs;
  V sums[M][2] = {};
  for (int64_t k = 0; k < inputs;) {
    V run[M][2] = {};
    for (const int64_t end = smaller(k + kRun, inputs); k < end; k += Type::kInputs) {
      __builtin_prefetch(ahead);
      if (kWidth * Type::kInputs * sizeof *w > 64) __builtin_prefetch(ahead + 64);
      ahead += ahead_step;
#pragma GCC unroll 2
      for (int part = 0; part < Type::kParts; ++part) {
        const V w0 = Type::weights(w, part, 0), w1 = Type::weights(w, part, 1);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const auto* inputs_of_row = x + m * stride + k + part;
          run[m][0] = Type::add(run[m][0], w0, inputs_of_row);
          run[m][1] = Type::add(run[m][1], w1, inputs_of_row);
        }
      }
      w += Type::kInputs * kWidth;
    }
    for (int m = 0; m < M; ++m) {
      sums[m][0] += run[m][0];
      sums[m][1] += run[m][1];
    }
  }
  for (int m = 0; m < M; ++m) {
    totals[m][0] += sums[m][0];
    totals[m][1] += sums[m][1];
  }
}

template <class Type, int M = kBlockRows>
void multiply_up_to(int64_t rows, const typename Type::Row* x, int64_t stride,
                    const typename Type::Element* w, int64_t inputs, const NextBlock& next,
                    V (*totals)[2]) {
  if (rows == M) return multiply_rows<Type, M>(x, stride, w, inputs, next, totals);
  if constexpr (M > 1) multiply_up_to<Type, M - 1>(rows, x, stride, w, inputs, next, totals);
}

// The same for any number of rows, in passes of equally many, which the registers hold.
template <class Type>
void multiply_block(int64_t rows, int64_t passes, const typename Type::Row* x, int64_t stride,
                    const typename Type::Element* w, int64_t inputs, NextBlock next,
                    V (*totals)[2]) {
  for (; passes > 0; --passes) {
    const int64_t part = (rows + passes - 1) / passes;
    multiply_up_to<Type>(part, x, stride, w, inputs, next, totals);
    next.begin += inputs * next.bytes;
    x += part * stride;
    totals += part;
    rows -= part;
  }
}

template <class Type>
void widen_block(const typename Type::Element* w, int64_t inputs, float* out) {
  for (int64_t k = 0; k < inputs; k += Type::kInputs, w += Type::kInputs * kWidth) {
    for (int part = 0; part < Type::kParts; ++part, out += kWidth) {
      store(out, Type::weights(w, part, 0));
      store(out + kLanes, Type::weights(w, part, 1));
    }
  }
}

// Rounds the totals of one panel once, with the bias, to y.
template <class Type>
void write_panel(const PackedLinearParams& p, int64_t first, const V (*totals)[2]) {
  using Element = typename Type::Element;
  const int64_t outputs = smaller(kWidth, p.out_features - first);
  const auto bytes = static_cast<size_t>(outputs) * sizeof(Element);
  V bias[2] = {};
  if (p.bias != nullptr) {
    Element lanes[kWidth] = {};
    __builtin_memcpy(lanes, static_cast<const Element*>(p.bias) + first, bytes);
    for (int r = 0; r < 2; ++r) bias[r] = Type::widen(lanes + r * kLanes);
  }
  for (int64_t m = 0; m < p.rows; ++m) {
    Element lanes[kWidth];
    for (int r = 0; r < 2; ++r) {
      const V total = totals[m][r];
      Type::narrow(p.bias == nullptr ? total : total + bias[r], lanes + r * kLanes);
    }
    __builtin_memcpy(static_cast<Element*>(p.y) + m * p.out_features + first, lanes, bytes);
  }
}

template <class Type>
void multiply(const PackedLinearParams& p, const void* rows, int64_t begin, int64_t end) {
  using Element = typename Type::Element;
  const int64_t size = row_size<Type>(p);
  const auto* w = static_cast<const Element*>(p.panels) + begin * size * kWidth;
  const bool widened = sizeof(Element) < sizeof(float) && p.rows > kBlockRows;
  const int64_t passes = (p.rows + kBlockRows - 1) / kBlockRows;
  alignas(64) float wide[kBlock * kWidth];
  V totals[kMaxLinearRows][2];
  for (int64_t panel = begin; panel < end; ++panel) {
    __builtin_memset(totals, 0, static_cast<size_t>(p.rows) * sizeof *totals);
    for (int64_t k = 0; k < size; k += kBlock) {
      const int64_t inputs = smaller(kBlock, size - k);
      const NextBlock next(w, inputs, kWidth * sizeof *w, passes);
      const auto* x = static_cast<const typename Type::Row*>(rows) + k;
      if (widened) {
        widen_block<Type>(w, inputs, wide);
        multiply_block<Float32>(p.rows, passes, x, size, wide, inputs, next, totals);
      } else {
        multiply_block<Type>(p.rows, passes, x, size, w, inputs, next, totals);
      }
      w += inputs * kWidth;
    }
    write_panel<Type>(p, panel * kWidth, totals);
  }
}

// float32 rows are read where they are.
int64_t no_bytes(const PackedLinearParams&) { return 0; }

template <class Type>
constexpr LinearKernel kernel_of() {
  return {rows_bytes<Type>, read_rows<Type>, multiply<Type>};
}

}  // namespace

extern const LinearKernels SPECDEC_CAT(linear_kernels_, SPECDEC_ISA);
const LinearKernels SPECDEC_CAT(linear_kernels_, SPECDEC_ISA) = {
    kWidth,
    {{no_bytes, nullptr, multiply<Float32>}, kernel_of<BFloat16>(), kernel_of<Float16>()},
};

}  // namespace specdec::cpu
