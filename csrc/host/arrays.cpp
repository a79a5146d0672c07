#include "host/arrays.h"

#include <algorithm>
#include <stdexcept>

namespace py = pybind11;

namespace specdec {
namespace {

std::string name_of(const py::dtype& type) { return py::str(type).cast<std::string>(); }

// NumPy has no bfloat16: it is the type of the package ml_dtypes, or two bytes in a field of this
// name, as specdec_host.bfloat16.
bool is_bfloat16(const py::dtype& type) {
  if (type.kind() != 'V' || type.itemsize() != 2) return false;
  if (!type.has_fields()) return name_of(type) == "bfloat16";
  return py::tuple(type.attr("names")).equal(py::make_tuple("bfloat16"));
}

ScalarType scalar_type_of(const py::dtype& type) {
  if (is_bfloat16(type)) return ScalarType::BFloat16;
  if (type.byteorder() != '=') return ScalarType::Other;
  const bool real = type.kind() == 'f', integer = type.kind() == 'i';
  switch (type.itemsize()) {
    case 2:
      return real ? ScalarType::Half : ScalarType::Other;
    case 4:
      return real ? ScalarType::Float : integer ? ScalarType::Int : ScalarType::Other;
    case 8:
      return real ? ScalarType::Double : integer ? ScalarType::Long : ScalarType::Other;
    default:
      return ScalarType::Other;
  }
}

// The structs of DLPack's ABI as a capsule named "dltensor" holds them.
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t* shape;
  const int64_t* strides;  // in elements; null if the tensor is contiguous
  uint64_t byte_offset;
};
constexpr uint8_t kDLBfloat = 4;

bool aligned(const py::array& array) {
  const auto whole = [&](py::ssize_t bytes) { return bytes % array.itemsize() == 0; };
  if (!whole(reinterpret_cast<py::ssize_t>(array.data()))) return false;
  for (py::ssize_t d = 0; d < array.ndim(); ++d) {
    // The stride of a dimension of one element is never used and may be any number.
    if (array.shape(d) > 1 && !whole(array.strides(d))) return false;
  }
  return true;
}

}  // namespace

std::string dtype_name(const Tensor& t) {
  if (t.scalar_type() != ScalarType::Other) return dtype_name(t.scalar_type());
  return name_of(py::reinterpret_borrow<py::array>(static_cast<PyObject*>(t.owner())).dtype());
}

Tensor tensor_of(const py::array& given) {
  const ScalarType dtype = scalar_type_of(given.dtype());
  const bool known = dtype != ScalarType::Other;  // the ops refuse an array of any other dtype
  const py::array array = known && !aligned(given) ? py::array(given.attr("copy")()) : given;
  const auto dims = static_cast<size_t>(array.ndim());
  std::vector<int64_t> sizes(array.shape(), array.shape() + dims), strides(dims, 1);
  for (size_t d = 0; known && d < dims; ++d) {
    if (sizes[d] > 1) strides[d] = array.strides(static_cast<py::ssize_t>(d)) / array.itemsize();
  }
  if (array.size() == 0) strides = contiguous_strides(sizes);  // NumPy's may be 0
  std::shared_ptr<void> owner(py::array(array).release().ptr(),
                              [](void* p) { Py_DECREF(static_cast<PyObject*>(p)); });
  return Tensor(std::move(owner), const_cast<void*>(array.data()), dtype, std::move(sizes),
                std::move(strides));
}

Tensor new_empty(const Tensor&, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return tensor_of(py::array(py::dtype(dtype_name(dtype)), std::vector<py::ssize_t>(shape)));
}

Tensor contiguous(const Tensor& t) {
  const auto array = py::reinterpret_borrow<py::array>(static_cast<PyObject*>(t.owner()));
  return tensor_of(py::array::ensure(array, py::array::c_style));
}

Tensor to_int64(const Tensor& t) {
  const auto array = py::reinterpret_borrow<py::array>(static_cast<PyObject*>(t.owner()));
  return tensor_of(py::array(array.attr("astype")(py::dtype("int64"), "C")));
}

py::object bfloat16_from_dlpack(const py::capsule& capsule, const py::dtype& dtype) {
  if (std::string(capsule.name()) != "dltensor") return py::none();
  const DLTensor& t = *capsule.get_pointer<DLTensor>();
  if (t.code != kDLBfloat || t.bits != 16 || t.lanes != 1) return py::none();
  const std::vector<int64_t> sizes(t.shape, t.shape + t.ndim);
  std::vector<int64_t> strides =
      t.strides != nullptr ? std::vector(t.strides, t.strides + t.ndim) : contiguous_strides(sizes);
  for (int64_t& stride : strides) stride *= 2;  // bytes
  // The capsule is not consumed: it frees the memory when the array that holds it is gone.
  return py::array(dtype, sizes, strides, static_cast<const char*>(t.data) + t.byte_offset,
                   capsule);
}

}  // namespace specdec
