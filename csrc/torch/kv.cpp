#include "torch/kv.h"

#include <torch/csrc/stable/accelerator.h>

#include "specdec/kv.h"
#include "torch/checks.h"
#include "torch/cuda_stream.h"
#include "torch/parallel.h"

namespace specdec {
namespace {

using torch::headeronly::DeviceType;

// On one device, not only on one kind of it: one launch serves them all.
void check_caches(const char* name, const std::vector<Tensor>& tensors, const Tensor& of) {
  const int64_t batch = of.size(0);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    SPECDEC_CHECK(t.dim() == 4 && t.size(0) == batch, name, "[", i,
                  "] must be [B, H, S, D] with B = ", batch, ", got ", shape_of(t));
    SPECDEC_CHECK(t.stride(3) == 1 || t.size(3) <= 1, name, "[", i, "]",
                  " must have a contiguous last dimension, got stride ", t.stride(3));
    SPECDEC_CHECK(t.device() == of.device(), name, "[", i,
                  "] must be on the device of positions or lengths, ", device_name(of), ", got ",
                  device_name(t));
  }
}

KvStrides strides_in_bytes(const Tensor& t) {
  const auto strides = t.strides();
  const int64_t size = static_cast<int64_t>(t.element_size());
  return {strides[0] * size, strides[1] * size, strides[2] * size};
}

// The tensors with anything to move. `entries` may be null.
std::vector<KvTensor> kv_tensors(const std::vector<Tensor>& caches,
                                 const std::vector<Tensor>* entries) {
  std::vector<KvTensor> out;
  out.reserve(caches.size());
  for (size_t i = 0; i < caches.size(); ++i) {
    const Tensor& cache = caches[i];
    if (cache.numel() == 0 || (entries != nullptr && (*entries)[i].numel() == 0)) continue;
    KvTensor t = {};
    t.cache = static_cast<char*>(cache.mutable_data_ptr());
    t.cache_stride = strides_in_bytes(cache);
    t.heads = cache.size(1);
    t.slots = cache.size(2);
    t.row_bytes = cache.size(3) * static_cast<int64_t>(cache.element_size());
    if (entries != nullptr) {
      const Tensor& entry = (*entries)[i];
      t.entries = static_cast<const char*>(entry.const_data_ptr());
      t.entry_stride = strides_in_bytes(entry);
      t.count = entry.size(2);
    }
    out.push_back(t);
  }
  return out;
}

#ifdef SPECDEC_WITH_CUDA
int launch(const KvAppendParams& p, void* stream) { return kv_append_cuda(p, stream); }
int launch(const KvTruncateParams& p, void* stream) { return kv_truncate_cuda(p, stream); }
#endif

template <class Params>
void run(const Tensor& of, const Params& p, void (*cpu)(const Params&, const Parallel&)) {
  if (of.device().type() == DeviceType::CPU) return cpu(p, torch_parallel());
#ifdef SPECDEC_WITH_CUDA
  const int32_t device = of.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int status = launch(p, current_cuda_stream(device));
  SPECDEC_CHECK(status == 0, "the CUDA kernels did not start, cudaError_t ", status);
#else
  SPECDEC_CHECK(false, "specdec_kernels was built without CUDA kernels");
#endif
}

}  // namespace

void kv_append_(std::vector<Tensor> caches, std::vector<Tensor> entries, Tensor positions) {
  SPECDEC_CHECK(positions.dim() == 1, "positions must be [B], got ", shape_of(positions));
  const int64_t batch = positions.size(0);
  check_vector("positions", positions, batch, ScalarType::Long, positions, "positions");
  SPECDEC_CHECK(caches.size() == entries.size(), "entries must have one tensor for each of the ",
                caches.size(), " caches, got ", entries.size());
  check_caches("caches", caches, positions);
  check_caches("entries", entries, positions);
  for (size_t i = 0; i < caches.size(); ++i) {
    const Tensor &cache = caches[i], &entry = entries[i];
    SPECDEC_CHECK(entry.size(1) == cache.size(1) && entry.size(3) == cache.size(3), "entries[", i,
                  "] must be [B, H, n, D] = [", batch, ", ", cache.size(1), ", n, ", cache.size(3),
                  "], got ", shape_of(entry));
    SPECDEC_CHECK(entry.scalar_type() == cache.scalar_type(), "entries[", i, "] must be ",
                  dtype_name(cache.scalar_type()), " like its cache, got ",
                  dtype_name(entry.scalar_type()));
  }
  const std::vector<KvTensor> tensors = kv_tensors(caches, &entries);
  const KvAppendParams p = {tensors.data(),
                            static_cast<int64_t>(tensors.size()),
                            batch,
                            {positions.const_data_ptr<int64_t>(), positions.stride(0)}};
  run(positions, p, kv_append_cpu);
}

void kv_truncate_(std::vector<Tensor> caches, Tensor lengths, Tensor new_lengths, bool zero_fill) {
  SPECDEC_CHECK(lengths.dim() == 1, "lengths must be [B], got ", shape_of(lengths));
  const int64_t batch = lengths.size(0);
  check_vector("lengths", lengths, batch, ScalarType::Long, lengths, "lengths");
  check_vector("new_lengths", new_lengths, batch, ScalarType::Long, lengths, "lengths");
  check_caches("caches", caches, lengths);
  const std::vector<KvTensor> tensors = kv_tensors(caches, nullptr);
  const KvTruncateParams p = {tensors.data(),
                              static_cast<int64_t>(tensors.size()),
                              batch,
                              {lengths.mutable_data_ptr<int64_t>(), lengths.stride(0)},
                              {new_lengths.const_data_ptr<int64_t>(), new_lengths.stride(0)},
                              zero_fill};
  run(lengths, p, kv_truncate_cpu);
}

}  // namespace specdec
