#include "arguments/checks.h"

#include <algorithm>

namespace specdec {

std::string shape_of(const Tensor& t) {
  std::ostringstream out;
  out << '[';
  for (int64_t i = 0; i < t.dim(); ++i) out << (i ? ", " : "") << t.size(i);
  out << ']';
  return out.str();
}

void check_same_device(const char* name, const Tensor& t, const Tensor& of_tensor, const char* of) {
  SPECDEC_CHECK(on_one_device(t, of_tensor), name, " must be on the device of ", of, ", ",
                device_name(of_tensor), ", got ", device_name(t));
}

void check_vector(const char* name, const Tensor& t, int64_t n, ScalarType dtype,
                  const Tensor& of_tensor, const char* of) {
  SPECDEC_CHECK(t.dim() == 1 && t.size(0) == n, name, " must be [", n, "], got ", shape_of(t));
  SPECDEC_CHECK(t.scalar_type() == dtype, name, " must be ", dtype_name(dtype), ", got ",
                dtype_name(t));
  check_same_device(name, t, of_tensor, of);
}

void check_integers(const char* name, const Tensor& t, int64_t n, const Tensor& of_tensor,
                    const char* of) {
  SPECDEC_CHECK(t.dim() == 1 && t.size(0) == n, name, " must be [", n, "], got ", shape_of(t));
  check_ids(name, t);
  check_same_device(name, t, of_tensor, of);
}

void check_matrix(const char* name, const Tensor& t, const char* shape, int64_t rows,
                  int64_t columns, ScalarType dtype, const Tensor& of_tensor, const char* of) {
  SPECDEC_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns, name, " must be ", shape,
                " = [", rows, ", ", columns, "], got ", shape_of(t));
  SPECDEC_CHECK(t.scalar_type() == dtype, name, " must be ", dtype_name(dtype), ", got ",
                dtype_name(t));
  check_same_device(name, t, of_tensor, of);
}

void check_entries(const char* name, const char* what, const char* dims,
                   std::initializer_list<int64_t> sizes) {
  constexpr int64_t kMaxEntries = int64_t{1} << 56;
  bool overflow = false;
  int64_t entries = 1;
  std::string got;
  for (const int64_t size : sizes) {
    overflow |= __builtin_mul_overflow(entries, std::max<int64_t>(size, 1), &entries);
  }
  if (!overflow && entries < kMaxEntries) return;
  for (const int64_t size : sizes) got += (got.empty() ? "" : ", ") + std::to_string(size);
  fail(name, " must leave ", what, " ", dims, " with less than 2**56 entries, got [", got, "]");
}

void check_floats(const char* name, const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  SPECDEC_CHECK(
      dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
      name, " must be float32, bfloat16 or float16, got ", dtype_name(t));
}

void check_rows(const char* name, const Tensor& t) {
  check_floats(name, t);
  const int64_t size = t.size(t.dim() - 1), stride = t.stride(t.dim() - 1);
  SPECDEC_CHECK(size >= 1 && size < (int64_t{1} << 31), name,
                " must have a vocabulary of 1 to 2147483647 entries, got ", shape_of(t));
  SPECDEC_CHECK(stride == 1 || size == 1, name,
                " must have a contiguous last dimension, got stride ", stride);
}

void check_bitmask(const char* name, const Tensor& words, const char* of, const Tensor& rows) {
  const int64_t last = rows.dim() - 1, n = bitmask_words(rows.size(last));
  bool fits = words.dim() == rows.dim() && words.size(last) == n;
  std::string sizes;
  for (int64_t i = 0; i < last; ++i) {
    fits = fits && words.size(i) == rows.size(i);
    sizes += std::to_string(rows.size(i)) + ", ";
  }
  SPECDEC_CHECK(fits, name, " must have the dimensions of ", of,
                " with ceil(V/32) words in the last one, [", sizes, n, "], got ", shape_of(words));
  SPECDEC_CHECK(words.scalar_type() == ScalarType::Int, name, " must be int32, got ",
                dtype_name(words));
  SPECDEC_CHECK(words.stride(last) == 1 || n == 1, name,
                " must have a contiguous last dimension, got stride ", words.stride(last));
}

TokenBitmask bitmask_of(const std::optional<Tensor>& words, bool flat) {
  if (!words) return {nullptr, 0, 0};
  return {static_cast<const uint32_t*>(words->const_data_ptr()), flat ? 0 : words->stride(0),
          words->stride(flat ? 0 : 1)};
}

void check_ids(const char* name, const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  SPECDEC_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, name,
                " must be int32 or int64, got ", dtype_name(t));
}

Ids ids_of(const Tensor& t) {
  const bool nested = t.dim() == 3;
  return {t.const_data_ptr(), t.scalar_type() == ScalarType::Long, t.stride(0),
          nested ? t.stride(1) : 0, t.stride(t.dim() - 1)};
}

IdsOut ids_out(const Tensor& t) {
  return {t.mutable_data_ptr(), t.scalar_type() == ScalarType::Long};
}

DType row_dtype(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      return DType::kFloat32;
  }
}

Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : contiguous(t); }

Tensor dense_int64(const Tensor& t) {
  return t.scalar_type() == ScalarType::Long ? dense(t) : to_int64(t);
}

void SamplingArguments::check(int64_t n, const Tensor& of_tensor, const char* of) const {
  // Checked as float32, which the kernels compute with.
  const auto temperature = static_cast<float>(this->temperature);
  const auto top_p = static_cast<float>(this->top_p), min_p = static_cast<float>(this->min_p);
  if (temperatures) {
    check_vector("temperature", *temperatures, n, ScalarType::Float, of_tensor, of);
  } else {
    SPECDEC_CHECK(std::isfinite(temperature) && temperature >= 0,
                  "temperature must be finite and at least 0, got ", temperature);
  }
  if (top_ks) {
    check_vector("top_k", *top_ks, n, ScalarType::Int, of_tensor, of);
  } else {
    SPECDEC_CHECK(top_k >= 0, "top_k must be at least 0 (0 keeps every token), got ", top_k);
  }
  if (top_ps) {
    check_vector("top_p", *top_ps, n, ScalarType::Float, of_tensor, of);
  } else {
    SPECDEC_CHECK(top_p > 0 && top_p <= 1, "top_p must be in (0, 1], got ", top_p);
  }
  if (min_ps) {
    check_vector("min_p", *min_ps, n, ScalarType::Float, of_tensor, of);
  } else {
    SPECDEC_CHECK(min_p >= 0 && min_p <= 1, "min_p must be in [0, 1], got ", min_p);
  }
}

SamplingParams SamplingArguments::params() {
  SamplingParams p{};
  p.temperatures = pointer<float>(temperatures);
  p.top_ks = pointer<int32_t>(top_ks);
  p.top_ps = pointer<float>(top_ps);
  p.min_ps = pointer<float>(min_ps);
  p.temperature = static_cast<float>(temperature);
  p.top_k = top_k;
  p.top_p = static_cast<float>(top_p);
  p.min_p = static_cast<float>(min_p);
  return p;
}

}  // namespace specdec
