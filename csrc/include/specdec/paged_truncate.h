#pragma once
// Parameters of paged_truncate_, which truncates sequences and removes the blocks that they no
// longer need from their block tables.
#include "specdec/kv.h"

namespace specdec {

struct PagedTruncateParams {
  KvTable<void> tables;  // [B, M]
  int64_t batch;
  int64_t block_size;
  KvVector<void> lengths;
  KvVector<const void> new_lengths;
  IdsOut blocks;       // [B, M]
  int32_t* num_freed;  // [B]
};

// The columns of a block table that truncation frees. No sum here can overflow.
SPECDEC_HD inline KvRange freed_columns(int64_t length, int64_t new_length, int64_t block_size,
                                        int64_t columns) {
  const auto blocks = [=](int64_t n) {
    const int64_t needed = n / block_size + (n % block_size != 0);
    return needed < columns ? needed : columns;
  };
  const int64_t begin = blocks(truncated_length(length, new_length));
  const int64_t end = length > 0 ? blocks(length) : 0;
  return {begin, end > begin ? end - begin : 0};
}

namespace cpu {
void paged_truncate(const PagedTruncateParams& p, const Parallel& parallel);
}  // namespace cpu

// As in kv.h: a cudaError_t, a cudaStream_t.
namespace cuda {
int paged_truncate(const PagedTruncateParams& p, void* stream);
}  // namespace cuda

}  // namespace specdec
