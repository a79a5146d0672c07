#pragma once
// Parameters of paged_append_, which writes new entries into a paged cache.
#include "specdec/paged_slots.h"

namespace specdec {

struct PagedAppendParams {
  const KvTensor*
      tensors;  // [num_tensors], on the host; entries are [B, heads, count, entry_bytes]
  int64_t num_tensors;
  int64_t batch;
  KvVector<const void> positions;  // the slot of the first entry of each sequence
  KvVector<const void> counts;     // how many of its entries are written; null: all
  PagedSlots slots;

  // Those entries of sequence b whose slot lies in its block table.
  SPECDEC_HD KvRange kept(const KvTensor& t, int64_t b) const {
    const int64_t asked = counts.data == nullptr ? t.count : counts[b];
    const int64_t count = asked < 0 ? 0 : asked < t.count ? asked : t.count;
    return kept_entries(positions[b], count, slots.count(t));
  }
};

namespace cpu {
void paged_append(const PagedAppendParams& p, const Parallel& parallel);
}  // namespace cpu

// As in kv.h: a cudaError_t, a cudaStream_t.
namespace cuda {
int paged_append(const PagedAppendParams& p, void* stream);
}  // namespace cuda

}  // namespace specdec
