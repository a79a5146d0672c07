#pragma once
// Shared by the cache ops: validation of a list of caches, and the list of KvTensor
// that the kernels take.
#include <type_traits>
#include <vector>

#include "arguments/memory.h"
#include "specdec/kv.h"

namespace specdec {

// The tensor must be [B] integers; B is returned, for the other arguments to be checked against.
int64_t check_batch(const char* name, const Tensor& t);
// Every tensor must be [B, H, S, D] and on the device of `of`, which is [B].
void check_caches(const char* name, const std::vector<Tensor>& tensors, const Tensor& of,
                  const char* of_name);
// Every tensor must be [num_blocks, block_size, H, D], with the same blocks, and on the device of
// `of`.
void check_paged_caches(const std::vector<Tensor>& caches, const Tensor& of, const char* of_name);
// The tensor must be [B, M] integers.
void check_block_tables(const Tensor& t, int64_t batch, const Tensor& of, const char* of_name);

// A cache that is not empty, as kernels take it. Of the dimensions 1 and 2, `slot_dim` is the slots
// and the other one the heads.
KvTensor kv_tensor(const Tensor& cache, int slot_dim = 2);
// The caches as kernels take them; empty ones are left out.
std::vector<KvTensor> kv_tensors(const std::vector<Tensor>& caches, int slot_dim = 2);
// The same with the entries to append to each cache.
std::vector<KvTensor> kv_tensors(const std::vector<Tensor>& caches,
                                 const std::vector<Tensor>& entries, int slot_dim = 2);

template <class T>
T* kv_data(const Tensor& t) {
  if constexpr (std::is_const_v<T>)
    return static_cast<T*>(t.const_data_ptr());
  else
    return static_cast<T*>(t.mutable_data_ptr());
}

template <class T>
KvVector<T> kv_vector(const Tensor& t) {
  return {kv_data<T>(t), t.scalar_type() == ScalarType::Long, t.stride(0)};
}

template <class T>
KvTable<T> kv_table(const Tensor& t) {
  return {kv_data<T>(t), t.scalar_type() == ScalarType::Long, t.stride(0), t.stride(1), t.size(1)};
}

}  // namespace specdec
