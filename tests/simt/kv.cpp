// csrc/cuda/kv.cu as a CPU library with a C interface, for tests/test_simt.py.
#include "../../csrc/cuda/kv.cu"

extern "C" {

int64_t simt_sizeof_tensor() { return sizeof(specdec::KvTensor); }

void simt_reverse(bool reverse) { simt::reverse = reverse; }

int64_t simt_launches() { return simt::launches; }

// Undefined on purpose: shows that the sanitizer is awake.
unsigned simt_misaligned_load(const char* bytes) {
  return reinterpret_cast<const uint4*>(bytes)->x;
}

int simt_kv_append(const specdec::KvTensor* tensors, int64_t num_tensors, int64_t batch,
                   const int64_t* positions, int64_t stride) {
  return specdec::kv_append_cuda({tensors, num_tensors, batch, {positions, stride}}, nullptr);
}

int simt_kv_truncate(const specdec::KvTensor* tensors, int64_t num_tensors, int64_t batch,
                     int64_t* lengths, int64_t stride, const int64_t* new_lengths,
                     int64_t new_stride, bool zero_fill) {
  return specdec::kv_truncate_cuda(
      {tensors, num_tensors, batch, {lengths, stride}, {new_lengths, new_stride}, zero_fill},
      nullptr);
}

}  // extern "C"
