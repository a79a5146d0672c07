#include "c/tensor.h"

#include <algorithm>
#include <cstring>

#include "arguments/checks.h"

namespace specdec {
namespace {

ScalarType scalar_type_of(const std::string& name, int32_t dtype) {
  switch (dtype) {
    case SPECDEC_FLOAT32:
      return ScalarType::Float;
    case SPECDEC_FLOAT64:
      return ScalarType::Double;
    case SPECDEC_FLOAT16:
      return ScalarType::Half;
    case SPECDEC_BFLOAT16:
      return ScalarType::BFloat16;
    case SPECDEC_INT32:
      return ScalarType::Int;
    case SPECDEC_INT64:
      return ScalarType::Long;
    case SPECDEC_BYTE:
      return ScalarType::Byte;
    default:
      fail(name, ".dtype must be of enum specdec_dtype, got ", dtype);
  }
}

// A contiguous tensor of `dtype` whose elements `copy(to, from)` makes of those of `t`.
template <class Copy>
Tensor copied(const Tensor& t, ScalarType dtype, Copy&& copy) {
  std::vector<int64_t> strides = contiguous_strides(t.sizes()), at(t.sizes().size(), 0);
  const size_t width = Array(nullptr, nullptr, dtype, {}, {}).element_size();
  const auto count = static_cast<size_t>(t.numel());
  std::shared_ptr<void> memory(::operator new(std::max<size_t>(count * width, 1)),
                               [](void* p) { ::operator delete(p); });
  const auto* from = static_cast<const char*>(t.const_data_ptr());
  auto* to = static_cast<char*>(memory.get());
  for (size_t i = 0; i < count; ++i, to += width) {
    int64_t place = 0;
    for (size_t d = 0; d < at.size(); ++d) place += at[d] * t.strides()[d];
    copy(to, from + place * static_cast<int64_t>(t.element_size()));
    for (size_t d = at.size(); d-- > 0 && ++at[d] == t.sizes()[d];) at[d] = 0;
  }
  void* const data = memory.get();
  return {t.name(), t.device(), {std::move(memory), data, dtype, t.sizes(), std::move(strides)}};
}

Tensor same(const Tensor& t) {
  const size_t width = t.element_size();
  return copied(t, t.scalar_type(), [&](char* to, const char* from) { memcpy(to, from, width); });
}

}  // namespace

Tensor tensor_of(const std::string& name, const specdec_tensor& t, const Device& device) {
  const ScalarType dtype = scalar_type_of(name, t.dtype);
  SPECDEC_CHECK(0 <= t.ndim && t.ndim <= SPECDEC_MAX_DIMS, name, ".ndim must be in [0, ",
                SPECDEC_MAX_DIMS, "], got ", t.ndim);
  std::vector<int64_t> sizes(t.sizes, t.sizes + t.ndim), strides(t.strides, t.strides + t.ndim);
  bool empty = false;
  for (int32_t d = 0; d < t.ndim; ++d) {
    SPECDEC_CHECK(sizes[d] >= 0, name, ".sizes[", d, "] must be at least 0, got ", sizes[d]);
    empty |= sizes[d] == 0;
  }
  SPECDEC_CHECK(empty || t.data != nullptr, name, ".data must not be null");
  const Array array(nullptr, t.data, dtype, std::move(sizes), std::move(strides));
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  SPECDEC_CHECK(empty || address % array.element_size() == 0, name,
                ".data must be aligned to its elements of ", array.element_size(),
                " bytes, got an address that ends in ", address % array.element_size());
  return {name, device, array};
}

std::string dtype_name(const Tensor& t) { return dtype_name(t.scalar_type()); }

Tensor contiguous(const Tensor& t) {
  SPECDEC_CHECK(!t.device().is_cuda, t.name(), " must be contiguous on CUDA");
  return same(t);
}

Tensor clone(const Tensor& t) {
  SPECDEC_CHECK(!t.device().is_cuda, t.name(), " must not overlap what is written, on CUDA");
  return same(t);
}

Tensor to_int64(const Tensor& t) {
  SPECDEC_CHECK(!t.device().is_cuda, t.name(), " must be int64 on CUDA, got ", dtype_name(t));
  return copied(t, ScalarType::Long, [](char* to, const char* from) {
    int32_t narrow;
    memcpy(&narrow, from, sizeof narrow);
    const int64_t wide = narrow;
    memcpy(to, &wide, sizeof wide);
  });
}

}  // namespace specdec
