#include "cpu/kv/slots.h"
#include "specdec/kv.h"

namespace specdec::cpu {

void kv_truncate(const KvTruncateParams& p, const Parallel& parallel) {
  zero_dropped<dropped_slots>(p, parallel);
  // After the zeroing, which needs the old lengths.
  for (int64_t b = 0; b < p.batch; ++b) {
    p.lengths.set(b, truncated_length(p.lengths[b], p.new_lengths[b]));
  }
}

}  // namespace specdec::cpu
