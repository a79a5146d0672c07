#pragma once
// PyTorch's tensors as csrc/arguments reads them. `new_empty`, `contiguous` and `clone` are
// those of torch::stable.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <string>

namespace specdec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::string dtype_name(ScalarType dtype);
inline std::string dtype_name(const Tensor& t) { return dtype_name(t.scalar_type()); }
inline std::string device_name(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  if (t.is_cuda()) return "cuda:" + std::to_string(t.get_device_index());
  return t.device().type() == torch::headeronly::DeviceType::Meta ? "meta" : "other";
}
// A contiguous copy in int64.
inline Tensor to_int64(const Tensor& t) {
  Tensor out = torch::stable::new_empty(t, t.sizes(), ScalarType::Long);
  return torch::stable::copy_(out, t);
}
// Without memory the address of a tensor is its offset in its storage.
inline bool has_memory(const Tensor& t) {
  const auto offset = static_cast<uintptr_t>(t.storage_offset()) * t.element_size();
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) != offset;
}
inline bool on_one_device(const Tensor& a, const Tensor& b) { return a.device() == b.device(); }

}  // namespace specdec
