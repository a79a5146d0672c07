#include "specdec/ring_truncate.h"

#include "cpu/kv/slots.h"

namespace specdec::cpu {

void ring_truncate(const RingTruncateParams& p, const Parallel& parallel) {
  zero_dropped<dropped_ring_slots>(p, parallel);
  // After the zeroing, which needs the old lengths.
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = p.lengths[b], new_length = p.new_lengths[b];
    p.status[b] = window_is_lost(length, new_length, p.slots, p.window);
    p.lengths.set(b, truncated_length(length, new_length));
  }
}

}  // namespace specdec::cpu
