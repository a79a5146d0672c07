#pragma once
// An array in memory, with the names of PyTorch's interface: what NumPy's arrays and the tensors of
// the C interface are to csrc/arguments.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace specdec {

enum class ScalarType { Float, Double, Half, BFloat16, Int, Long, Byte, Other };

class Array {
 public:
  Array() = default;
  // `owner` keeps the memory, may be null; strides are in elements.
  Array(std::shared_ptr<void> owner, void* data, ScalarType dtype, std::vector<int64_t> sizes,
        std::vector<int64_t> strides)
      : owner_(std::move(owner)),
        data_(data),
        dtype_(dtype),
        sizes_(std::move(sizes)),
        strides_(std::move(strides)) {}

  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t size(int64_t d) const { return sizes_[static_cast<size_t>(d)]; }
  int64_t stride(int64_t d) const { return strides_[static_cast<size_t>(d)]; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<int64_t>& strides() const { return strides_; }
  int64_t numel() const;
  ScalarType scalar_type() const { return dtype_; }
  size_t element_size() const;
  bool is_contiguous() const;
  const void* const_data_ptr() const { return data_; }
  void* mutable_data_ptr() const { return data_; }
  template <class T>
  const T* const_data_ptr() const {
    return static_cast<const T*>(data_);
  }
  template <class T>
  T* mutable_data_ptr() const {
    return static_cast<T*>(data_);
  }
  void* owner() const { return owner_.get(); }

 private:
  std::shared_ptr<void> owner_;
  void* data_ = nullptr;
  ScalarType dtype_ = ScalarType::Other;
  std::vector<int64_t> sizes_, strides_;
};

inline int64_t Array::numel() const {
  int64_t n = 1;
  for (const int64_t size : sizes_) n *= size;
  return n;
}

inline size_t Array::element_size() const {
  switch (dtype_) {
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    default:
      return 1;
  }
}

inline bool Array::is_contiguous() const {
  int64_t expected = 1;
  bool dense = true;
  for (size_t d = sizes_.size(); d-- > 0;) {
    if (sizes_[d] == 0) return true;
    dense &= sizes_[d] == 1 || strides_[d] == expected;
    expected *= sizes_[d];
  }
  return dense;
}

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Byte:
      return "uint8";
    default:
      return "other";
  }
}

// In elements.
inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

}  // namespace specdec
