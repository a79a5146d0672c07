#pragma once
// NumPy's arrays as csrc/arguments reads and allocates them, with the names of PyTorch's interface.
// It needs the GIL to copy a tensor, to make one and to destroy it.
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

namespace specdec {

enum class ScalarType { Float, Double, Half, BFloat16, Int, Long, Other };

class Tensor {
 public:
  Tensor() = default;
  // `array` is the NumPy array that owns the memory; strides are in elements.
  Tensor(std::shared_ptr<void> array, void* data, ScalarType dtype, std::vector<int64_t> sizes,
         std::vector<int64_t> strides)
      : array_(std::move(array)),
        data_(data),
        dtype_(dtype),
        sizes_(std::move(sizes)),
        strides_(std::move(strides)) {}

  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t size(int64_t d) const { return sizes_[static_cast<size_t>(d)]; }
  int64_t stride(int64_t d) const { return strides_[static_cast<size_t>(d)]; }
  ScalarType scalar_type() const { return dtype_; }
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
  void* array() const { return array_.get(); }

 private:
  std::shared_ptr<void> array_;
  void* data_ = nullptr;
  ScalarType dtype_ = ScalarType::Other;
  std::vector<int64_t> sizes_, strides_;
};

std::string dtype_name(ScalarType dtype);
std::string dtype_name(const Tensor& t);
// There is one device.
inline std::string device_name(const Tensor&) { return "cpu"; }
inline bool on_one_device(const Tensor&, const Tensor&) { return true; }

// Uninitialised.
Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype);
Tensor contiguous(const Tensor& t);
Tensor to_int64(const Tensor& t);  // a contiguous copy

}  // namespace specdec
