#pragma once
// The tensors of the C interface as csrc/arguments reads them.
#include <string>
#include <utility>

#include "arguments/array.h"
#include "specdec/specdec.h"

namespace specdec {

// Where a call runs, and where all its tensors are.
struct Device {
  bool is_cuda = false;
  void* stream = nullptr;
};

class Tensor : public Array {
 public:
  Tensor() = default;
  Tensor(std::string name, const Device& device, Array array)
      : Array(std::move(array)), name_(std::move(name)), device_(device) {}

  const std::string& name() const { return name_; }
  const Device& device() const { return device_; }

 private:
  std::string name_;
  Device device_;
};

// Throws if the fields of `t` describe no tensor; `name` is that of the argument.
Tensor tensor_of(const std::string& name, const specdec_tensor& t, const Device& device);

std::string dtype_name(const Tensor& t);
inline std::string device_name(const Tensor& t) { return t.device().is_cuda ? "cuda" : "cpu"; }
// All pointers of a call are to one device.
inline bool on_one_device(const Tensor&, const Tensor&) { return true; }
inline bool has_memory(const Tensor&) { return true; }

// Copies, which the tensor that is returned owns. Memory of a device is never copied: they throw.
Tensor contiguous(const Tensor& t);
Tensor clone(const Tensor& t);
Tensor to_int64(const Tensor& t);

}  // namespace specdec
