#include "specdec/attention.h"

#include <cmath>

#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {
namespace {

using Number = std::optional<double>;

void check_dense_rows(const char* name, const Tensor& t) {
  SPECDEC_CHECK(t.size(3) >= 1, name, " must have at least 1 entry in the last dimension, got ",
                shape_of(t));
  SPECDEC_CHECK(t.stride(3) == 1 || t.size(3) == 1, name,
                " must have a contiguous last dimension, got stride ", t.stride(3));
}

// Keys or values, whose last dimension is `size`, or any where that is 0.
void check_cache(const char* name, const Tensor& t, const char* shape, const Tensor& query,
                 int64_t heads, int64_t slots, int64_t size) {
  SPECDEC_CHECK(t.dim() == 4 && t.size(0) == query.size(0) && t.size(1) == heads &&
                    t.size(2) == slots && (size == 0 || t.size(3) == size),
                name, " must be ", shape, ", got ", shape_of(t));
  SPECDEC_CHECK(t.scalar_type() == query.scalar_type(), name, " must be ", dtype_name(query),
                ", got ", dtype_name(t));
  check_same_device(name, t, query, "query");
  check_dense_rows(name, t);
}

template <class... Sizes>
std::string shape_text(const Sizes&... sizes) {
  std::ostringstream out;
  const char* separator = "";
  ((out << separator << sizes, separator = ", "), ...);
  return "[" + out.str() + "]";
}

void check_cached_attention(const Tensor& query, const Tensor& keys, const Tensor& values,
                            const std::optional<Tensor>& mask, const Number& scale,
                            const Number& soft_cap) {
  SPECDEC_CHECK(query.dim() == 4, "query must be [B, H, n, D], got ", shape_of(query));
  check_floats("query", query);
  check_on_cpu("query", query);
  check_dense_rows("query", query);
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2);
  const int64_t kv_heads = keys.dim() == 4 ? keys.size(1) : 0;
  const int64_t slots = keys.dim() == 4 ? keys.size(2) : 0;
  check_cache("keys", keys,
              ("[B, H_kv, S, D] = " + shape_text(batch, "H_kv", "S", query.size(3))).c_str(), query,
              kv_heads, slots, query.size(3));
  SPECDEC_CHECK(kv_heads >= 1 && heads % kv_heads == 0,
                "keys must have a number of heads that divides ", heads, ", that of query, got ",
                kv_heads);
  SPECDEC_CHECK(slots < int64_t{1} << 31, "keys must have less than 2147483648 slots, got ", slots);
  check_cache("values", values,
              ("[B, H_kv, S, D_v] = " + shape_text(batch, kv_heads, slots, "D_v")).c_str(), query,
              kv_heads, slots, 0);
  if (mask) {
    SPECDEC_CHECK(mask->dim() == 4 && mask->size(0) == batch && mask->size(1) == 1 &&
                      mask->size(2) == queries && mask->size(3) == slots,
                  "mask must be [B, 1, n, S] = ", shape_text(batch, 1, queries, slots), ", got ",
                  shape_of(*mask));
    SPECDEC_CHECK(mask->scalar_type() == ScalarType::Bool, "mask must be bool, got ",
                  dtype_name(*mask));
    check_same_device("mask", *mask, query, "query");
  }
  SPECDEC_CHECK(!scale || std::isfinite(static_cast<float>(*scale)), "scale must be finite, got ",
                *scale);
  SPECDEC_CHECK(!soft_cap || (std::isfinite(static_cast<float>(*soft_cap)) &&
                              static_cast<float>(*soft_cap) > 0),
                "soft_cap must be finite and above 0, got ", *soft_cap);
  check_entries("query", "the output", "[B, n, H, D_v]", {batch, queries, heads, values.size(3)});
}

AttentionStrides strides_of(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

Tensor cached_attention(Tensor query, Tensor keys, Tensor values, std::optional<Tensor> mask,
                        Number scale, Number soft_cap) {
  check_cached_attention(query, keys, values, mask, scale, soft_cap);
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2);
  const int64_t slots = keys.size(2), size = query.size(3), value_size = values.size(3);
  Tensor out = torch::stable::new_empty(query, {batch, queries, heads, value_size});
  if (mask && mask->stride(3) != 1) mask = contiguous(*mask);
  const CachedAttentionParams p = {
      query.const_data_ptr(),
      keys.const_data_ptr(),
      values.const_data_ptr(),
      mask ? static_cast<const uint8_t*>(mask->const_data_ptr()) : nullptr,
      out.mutable_data_ptr(),
      row_dtype(query),
      batch,
      heads,
      keys.size(1),
      queries,
      slots,
      size,
      value_size,
      strides_of(query),
      strides_of(keys),
      strides_of(values),
      mask ? mask->stride(0) : 0,
      mask ? mask->stride(2) : 0,
      static_cast<float>(scale ? *scale : 1 / std::sqrt(static_cast<double>(size))),
      soft_cap ? static_cast<float>(*soft_cap) : 0.0f};
  cpu::cached_attention(p, torch_parallel());
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "cached_attention(Tensor query, Tensor keys, Tensor values, Tensor? mask, float? scale, "
      "float? soft_cap) -> Tensor");
  m.def(
      "validate_cached_attention(Tensor query, Tensor keys, Tensor values, Tensor? mask, "
      "float? scale, float? soft_cap) -> ()");
}
SPECDEC_IMPLEMENT_CPU(cached_attention)
SPECDEC_VALIDATE(cached_attention, check_cached_attention)

}  // namespace
}  // namespace specdec
