// Compiled once per instruction set (SPECDEC_ISA). Nothing here may be an inline function of a
// shared header: the linker would keep one build of it for all processors.
#include "cpu/forward/decoder_layer_tile.h"

#include "cpu/forward/element.h"

#define SPECDEC_CAT_(a, b) a##b
#define SPECDEC_CAT(a, b) SPECDEC_CAT_(a, b)

namespace specdec::cpu {
namespace {

constexpr int kSums = 4;  // side by side, to hide the latency of an addition

template <class Type>
V rounded(V v) {
  typename Type::Element lanes[kLanes];
  Type::narrow(v, lanes);
  return Type::widen(lanes);
}

template <class Type>
void narrow_up_to(V v, typename Type::Element* out, int64_t n) {
  if (n >= kLanes) return Type::narrow(v, out);
  typename Type::Element lanes[kLanes];
  Type::narrow(v, lanes);
  __builtin_memcpy(out, lanes, static_cast<size_t>(n) * sizeof *out);
}

// a b + c d with each product rounded to the dtype. The compiler must not choose which product of
// float32 stays exact, because it may choose otherwise at the end of a row.
template <class Type>
V sum_of_products(V a, V b, V c, V d) {
  if constexpr (sizeof(typename Type::Element) == sizeof(float)) return multiply_add(a, b, c * d);
  return rounded<Type>(a * b) + rounded<Type>(c * d);
}

template <class Type>
void normalise(const void* x_data, const void* weight_data, void* y_data, int64_t size,
               float epsilon) {
  const auto* x = static_cast<const typename Type::Element*>(x_data);
  const auto* weight = static_cast<const typename Type::Element*>(weight_data);
  auto* y = static_cast<typename Type::Element*>(y_data);
  V sums[kSums] = {};
  for (int64_t k = 0, i = 0; k < size; k += kLanes, i = (i + 1) % kSums) {
    const V v = widen_up_to<Type>(x + k, size - k);
    sums[i] = multiply_add(v, v, sums[i]);
  }
  const V sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float total = sum[0];
  for (int i = 1; i < kLanes; ++i) total += sum[i];
  const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(size) + epsilon);
  for (int64_t k = 0; k < size; k += kLanes) {
    const V v = rounded<Type>(widen_up_to<Type>(x + k, size - k) * factor);
    narrow_up_to<Type>(widen_up_to<Type>(weight + k, size - k) * v, y + k, size - k);
  }
}

template <class Type>
void rotate(void* data, int64_t heads, int64_t size, const void* cos_data, const void* sin_data) {
  const auto* cos = static_cast<const typename Type::Element*>(cos_data);
  const auto* sin = static_cast<const typename Type::Element*>(sin_data);
  auto* a = static_cast<typename Type::Element*>(data);
  const int64_t half = size / 2;
  for (int64_t head = 0; head < heads; ++head, a += size) {
    auto* b = a + half;
    for (int64_t k = 0; k < half; k += kLanes) {
      const int64_t n = half - k;
      const V first = widen_up_to<Type>(a + k, n), second = widen_up_to<Type>(b + k, n);
      const V sin_first = widen_up_to<Type>(sin + k, n);
      const V sin_second = widen_up_to<Type>(sin + half + k, n);
      const V rotated =
          sum_of_products<Type>(first, widen_up_to<Type>(cos + k, n), -second, sin_first);
      narrow_up_to<Type>(
          sum_of_products<Type>(second, widen_up_to<Type>(cos + half + k, n), first, sin_second),
          b + k, n);
      narrow_up_to<Type>(rotated, a + k, n);
    }
  }
}

// 1 / (1 + e^-x), from the exponential of a number that is not positive.
inline V sigmoid(V x) {
  const V small = exponential((V)((U)x | 0x80000000u));
  return (x < V{} ? small : V{} + 1.0f) / (small + 1.0f);
}

template <class Type>
void gate(void* gate_data, const void* up_data, int64_t size) {
  auto* gate = static_cast<typename Type::Element*>(gate_data);
  const auto* up = static_cast<const typename Type::Element*>(up_data);
  for (int64_t k = 0; k < size; k += kLanes) {
    const V x = widen_up_to<Type>(gate + k, size - k);
    const V activated = rounded<Type>(x * sigmoid(x));
    narrow_up_to<Type>(activated * widen_up_to<Type>(up + k, size - k), gate + k, size - k);
  }
}

template <class Type>
void add(void* y_data, const void* x_data, int64_t size) {
  auto* y = static_cast<typename Type::Element*>(y_data);
  const auto* x = static_cast<const typename Type::Element*>(x_data);
  for (int64_t k = 0; k < size; k += kLanes) {
    const V sum = widen_up_to<Type>(x + k, size - k) + widen_up_to<Type>(y + k, size - k);
    narrow_up_to<Type>(sum, y + k, size - k);
  }
}

}  // namespace

#define SPECDEC_BY_DTYPE(f) {f<Float32>, f<BFloat16>, f<Float16>}
extern const DecoderLayerKernels SPECDEC_CAT(decoder_layer_kernels_, SPECDEC_ISA);
const DecoderLayerKernels SPECDEC_CAT(decoder_layer_kernels_, SPECDEC_ISA) = {
    SPECDEC_BY_DTYPE(normalise), SPECDEC_BY_DTYPE(rotate), SPECDEC_BY_DTYPE(gate),
    SPECDEC_BY_DTYPE(add)};

}  // namespace specdec::cpu
