#include "arguments/kv.h"

namespace specdec {
namespace {

KvStrides strides_in_bytes(const Tensor& t, int slot_dim = 2) {
  const int64_t size = static_cast<int64_t>(t.element_size());
  const auto &sizes = t.sizes(), &strides = t.strides();
  // The stride of a dimension of one element is never used and may be any number.
  const auto stride = [&](int d) { return sizes[d] > 1 ? strides[d] * size : 0; };
  return {stride(0), stride(3 - slot_dim), stride(slot_dim)};
}

// Treats all heads of a token as one, where they are adjacent in memory.
void merge_heads(KvTensor* t) {
  const bool entries = t->entries == nullptr || t->entry_stride.head == t->entry_bytes;
  if (t->heads > 1 && t->cache_stride.head == t->entry_bytes && entries) {
    t->entry_bytes *= t->heads;
    t->heads = 1;
  }
}

}  // namespace

KvTensor kv_tensor(const Tensor& cache, int slot_dim) {
  KvTensor t = {};
  t.cache = static_cast<char*>(cache.mutable_data_ptr());
  t.cache_stride = strides_in_bytes(cache, slot_dim);
  t.heads = cache.size(3 - slot_dim);
  t.slots = cache.size(slot_dim);
  t.entry_bytes = cache.size(3) * static_cast<int64_t>(cache.element_size());
  return t;
}

int64_t check_batch(const char* name, const Tensor& t) {
  SPECDEC_CHECK(t.dim() == 1, name, " must be [B], got ", shape_of(t));
  const int64_t batch = t.size(0);
  check_ids(name, t);
  return batch;
}

// All on one device, and not only of one type of device, because one launch reads them all.
void check_caches(const char* name, const std::vector<Tensor>& tensors, const Tensor& of,
                  const char* of_name) {
  const int64_t batch = of.size(0);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    SPECDEC_CHECK(t.dim() == 4 && t.size(0) == batch, name, "[", i,
                  "] must be [B, H, S, D] with B = ", batch, ", got ", shape_of(t));
    SPECDEC_CHECK(t.stride(3) == 1 || t.size(3) <= 1, name, "[", i, "]",
                  " must have a contiguous last dimension, got stride ", t.stride(3));
    SPECDEC_CHECK(on_one_device(t, of), name, "[", i, "] must be on the device of ", of_name, ", ",
                  device_name(of), ", got ", device_name(t));
  }
}

void check_paged_caches(const std::vector<Tensor>& caches, const Tensor& of, const char* of_name) {
  for (size_t i = 0; i < caches.size(); ++i) {
    const Tensor& t = caches[i];
    SPECDEC_CHECK(t.dim() == 4, "caches[", i, "] must be [num_blocks, block_size, H, D], got ",
                  shape_of(t));
    const Tensor& first = caches[0];
    SPECDEC_CHECK(t.size(0) == first.size(0) && t.size(1) == first.size(1), "caches[", i,
                  "] must be [num_blocks, block_size, H, D] = [", first.size(0), ", ",
                  first.size(1), ", H, D], got ", shape_of(t));
    SPECDEC_CHECK(t.stride(3) == 1 || t.size(3) <= 1, "caches[", i,
                  "] must have a contiguous last dimension, got stride ", t.stride(3));
    SPECDEC_CHECK(on_one_device(t, of), "caches[", i, "] must be on the device of ", of_name, ", ",
                  device_name(of), ", got ", device_name(t));
  }
}

void check_block_tables(const Tensor& t, int64_t batch, const Tensor& of, const char* of_name) {
  SPECDEC_CHECK(t.dim() == 2 && t.size(0) == batch, "block_tables must be [B, M] with B = ", batch,
                ", got ", shape_of(t));
  check_ids("block_tables", t);
  check_same_device("block_tables", t, of, of_name);
}

std::vector<KvTensor> kv_tensors(const std::vector<Tensor>& caches,
                                 const std::vector<Tensor>& entries, int slot_dim) {
  std::vector<KvTensor> out;
  out.reserve(caches.size());
  for (size_t i = 0; i < caches.size(); ++i) {
    const Tensor& entry = entries[i];
    if (caches[i].numel() == 0 || entry.numel() == 0) continue;
    KvTensor t = kv_tensor(caches[i], slot_dim);
    t.entries = static_cast<const char*>(entry.const_data_ptr());
    t.entry_stride = strides_in_bytes(entry, slot_dim);
    t.count = entry.size(slot_dim);
    merge_heads(&t);
    out.push_back(t);
  }
  return out;
}

std::vector<KvTensor> kv_tensors(const std::vector<Tensor>& caches, int slot_dim) {
  std::vector<KvTensor> out;
  out.reserve(caches.size());
  for (const Tensor& cache : caches) {
    if (cache.numel() == 0) continue;
    out.push_back(kv_tensor(cache, slot_dim));
    merge_heads(&out.back());
  }
  return out;
}

}  // namespace specdec
