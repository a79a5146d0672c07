#pragma once
// In-place maintenance of the KV cache. Bytes move, whatever the dtype: strides are in bytes.
#include <cstdint>

#include "specdec/host_device.h"
#include "specdec/parallel.h"

namespace specdec {

struct KvStrides {
  int64_t sequence, head, slot;  // bytes from one to the next
};

// One cache of a call, and for kv_append_ what goes into it.
struct KvTensor {
  char* cache;          // [B, heads, slots, row_bytes]; a paged one has a block for a sequence
  const char* entries;  // [B, heads, count, row_bytes]; null but in kv_append_
  KvStrides cache_stride;
  KvStrides entry_stride;
  int64_t heads;
  int64_t slots;
  int64_t count;
  int64_t row_bytes;
};

// One value a sequence.
template <class T>
struct KvVector {
  T* data;         // [B], on the device of the caches
  int64_t stride;  // elements

  SPECDEC_HD T& operator[](int64_t b) const { return data[b * stride]; }
};

// One row a sequence.
template <class T>
struct KvTable {
  T* data;                                 // [B, columns], on the device of the caches
  int64_t sequence_stride, column_stride;  // elements
  int64_t columns;

  SPECDEC_HD T& at(int64_t b, int64_t i) const {
    return data[b * sequence_stride + i * column_stride];
  }
};

struct KvAppendParams {
  const KvTensor* tensors;  // [num_tensors], on the host
  int64_t num_tensors;
  int64_t batch;
  KvVector<const int64_t> positions;
};

struct KvTruncateParams {
  const KvTensor* tensors;  // [num_tensors], on the host
  int64_t num_tensors;
  int64_t batch;
  KvVector<int64_t> lengths;
  KvVector<const int64_t> new_lengths;
  bool zero_fill;
};

struct KvRange {
  int64_t begin, size;
};

// Which of `count` entries have a slot in [0, slots). No sum here can overflow.
SPECDEC_HD inline KvRange kept_entries(int64_t position, int64_t count, int64_t slots) {
  if (position >= slots || position <= -count) return {0, 0};
  const int64_t begin = position < 0 ? -position : 0;
  const int64_t room = slots - position;
  return {begin, (count < room ? count : room) - begin};
}

SPECDEC_HD inline int64_t truncated_length(int64_t length, int64_t new_length) {
  const int64_t shorter = new_length < length ? new_length : length;
  return shorter > 0 ? shorter : 0;
}

// The slots that truncation drops.
SPECDEC_HD inline KvRange dropped_slots(int64_t length, int64_t new_length, int64_t slots) {
  const int64_t begin = truncated_length(length, new_length);
  const int64_t end = length < slots ? length : slots;
  return end > begin ? KvRange{begin, end - begin} : KvRange{0, 0};
}

namespace cpu {
void kv_append(const KvAppendParams& p, const Parallel& parallel);
void kv_truncate(const KvTruncateParams& p, const Parallel& parallel);
}  // namespace cpu

// A cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a cudaStream_t.
namespace cuda {
int kv_append(const KvAppendParams& p, void* stream);
int kv_truncate(const KvTruncateParams& p, void* stream);
}  // namespace cuda

}  // namespace specdec
