#pragma once
// Parameters of the ops that change KV caches in place. A slot is one token's place in a cache; an
// entry is what one head keeps in a slot. The kernels move bytes and do not know the dtype, so
// strides of caches are in bytes.
#include <cstdint>

#include "specdec/host_device.h"
#include "specdec/ids.h"
#include "specdec/parallel.h"

namespace specdec {

struct KvStrides {
  int64_t sequence, head, slot;  // bytes
};

// One cache of a call, and for kv_append_ and paged_append_ the entries that are written to it.
struct KvTensor {
  char* cache;          // [B, heads, slots, entry_bytes]; if paged, the first dimension is blocks
  const char* entries;  // [B, heads, count, entry_bytes]; null where nothing is appended
  KvStrides cache_stride;
  KvStrides entry_stride;
  int64_t heads;
  int64_t slots;
  int64_t count;
  int64_t entry_bytes;
};

// One integer for each sequence; Data is const where a kernel only reads them.
template <class Data>
struct KvVector {
  Data* data;  // [B] int32 or int64, on the device of the caches
  bool are_int64;
  int64_t stride;  // elements

  SPECDEC_HD int64_t operator[](int64_t b) const { return Integers{data, are_int64}[b * stride]; }
  SPECDEC_HD void set(int64_t b, int64_t value) const {
    IdsOut{data, are_int64}.set(b * stride, value);
  }
};

// One list of `columns` integers for each sequence.
template <class Data>
struct KvTable {
  Data* data;  // [B, columns] int32 or int64, on the device of the caches
  bool are_int64;
  int64_t sequence_stride, column_stride;  // elements
  int64_t columns;

  SPECDEC_HD int64_t at(int64_t b, int64_t i) const {
    return Integers{data, are_int64}[b * sequence_stride + i * column_stride];
  }
  SPECDEC_HD void set(int64_t b, int64_t i, int64_t value) const {
    IdsOut{data, are_int64}.set(b * sequence_stride + i * column_stride, value);
  }
};

struct KvAppendParams {
  const KvTensor* tensors;  // [num_tensors], on the host
  int64_t num_tensors;
  int64_t batch;
  KvVector<const void> positions;
};

struct KvTruncateParams {
  const KvTensor* tensors;  // [num_tensors], on the host
  int64_t num_tensors;
  int64_t batch;
  KvVector<void> lengths;
  KvVector<const void> new_lengths;
  bool zero_fill;
};

struct KvRange {
  int64_t begin, size;
};

// Those of `count` entries from slot `position` on that have a slot in [0, slots). No sum here or
// in the functions below can overflow, whatever the arguments.
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

// Returns a cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a
// cudaStream_t.
namespace cuda {
int kv_append(const KvAppendParams& p, void* stream);
int kv_truncate(const KvTruncateParams& p, void* stream);
}  // namespace cuda

}  // namespace specdec
