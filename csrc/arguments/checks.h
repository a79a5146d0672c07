#pragma once
// The checks that the validation of every op is made of. There is no other validation: what is
// written in Python, fake kernels too, calls this one (specdec_kernels/arguments/validation.py).
#include <cmath>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "arguments/op.h"
#include "arguments/tensor.h"
#include "specdec/draft.h"
#include "specdec/ids.h"

namespace specdec {

// A fault of a caller of an op, as a message that names the argument, the rule and the value.
struct ArgumentError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws the message alone, without a file and line of this library in front of it.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  throw ArgumentError(out.str());
}

// A macro, so that the parts of the message are evaluated only on failure.
#define SPECDEC_CHECK(condition, ...)               \
  do {                                              \
    if (!(condition)) ::specdec::fail(__VA_ARGS__); \
  } while (0)

std::string shape_of(const Tensor& t);

void check_same_device(const char* name, const Tensor& t, const Tensor& of_tensor, const char* of);
void check_vector(const char* name, const Tensor& t, int64_t n, ScalarType dtype,
                  const Tensor& of_tensor, const char* of);
void check_matrix(const char* name, const Tensor& t, const char* shape, int64_t rows,
                  int64_t columns, ScalarType dtype, const Tensor& of_tensor, const char* of);
// The same for integers, which may be int32 or int64.
void check_integers(const char* name, const Tensor& t, int64_t n, const Tensor& of_tensor,
                    const char* of);
// The enumerator with this number; throws if there is none. Schemas hold numbers and no strings,
// because the stable ABI leaks each string argument. The names are in arguments/rules.py.
template <class E>
E enum_of(const char* name, int64_t value, E last) {
  SPECDEC_CHECK(0 <= value && value <= static_cast<int64_t>(last), name, " must be in [0, ",
                static_cast<int64_t>(last), "], got ", value);
  return static_cast<E>(value);
}
// What an op allocates must have so few entries that no index and no size in bytes overflows.
// Expanded and empty tensors may have any sizes without holding memory.
void check_entries(const char* name, const char* what, const char* dims,
                   std::initializer_list<int64_t> sizes);
void check_floats(const char* name, const Tensor& t);  // float32, bfloat16 or float16
// The last dimension must be a vocabulary that kernels can read: dtype, size and stride.
void check_rows(const char* name, const Tensor& t);

// One bit for each token of each row: int32 words, with the other dimensions of the rows.
void check_bitmask(const char* name, const Tensor& words, const char* of, const Tensor& rows);
// Of rows whose sequences are a dimension of their own, or which are `flat`.
TokenBitmask bitmask_of(const std::optional<Tensor>& words, bool flat);

void check_ids(const char* name, const Tensor& t);  // int32 or int64
Ids ids_of(const Tensor& t);                        // [B, N] or [B, K, L]
IdsOut ids_out(const Tensor& t);

DType row_dtype(const Tensor& t);
Tensor dense(const Tensor& t);  // itself if it is contiguous, else a contiguous copy
// The same of a small tensor of integers, which kernels read as int64.
Tensor dense_int64(const Tensor& t);

// A pointer to the values of a tensor, which becomes contiguous; null where there is no tensor.
template <class T>
const T* pointer(std::optional<Tensor>& t) {
  if (!t) return nullptr;
  *t = dense(*t);
  return t->const_data_ptr<T>();
}

inline const int64_t* int64s(std::optional<Tensor>& t) {
  if (!t) return nullptr;
  *t = dense_int64(*t);
  return t->const_data_ptr<int64_t>();
}
// The same for kernels that read either width.
inline Integers integers(std::optional<Tensor>& t) {
  if (!t) return {nullptr, false};
  *t = dense(*t);
  return {t->const_data_ptr(), t->scalar_type() == ScalarType::Long};
}

// The eight sampling arguments of the ops. They own the memory that `params` points into.
struct SamplingArguments {
  std::optional<Tensor> temperatures;
  double temperature = 1;
  std::optional<Tensor> top_ks;
  int64_t top_k = 0;
  std::optional<Tensor> top_ps;
  double top_p = 1;
  std::optional<Tensor> min_ps;
  double min_p = 0;

  auto arguments() {
    return std::make_tuple(
        argument("temperatures", temperatures), argument("temperature", temperature),
        argument("top_ks", top_ks), argument("top_k", top_k), argument("top_ps", top_ps),
        argument("top_p", top_p), argument("min_ps", min_ps), argument("min_p", min_p));
  }
  void check(int64_t n, const Tensor& of_tensor, const char* of) const;
  SamplingParams params();
};

}  // namespace specdec
