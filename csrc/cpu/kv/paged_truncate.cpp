#include "specdec/paged_truncate.h"

namespace specdec::cpu {

// Each sequence takes a few integers only, which is less work than waking threads.
void paged_truncate(const PagedTruncateParams& p, const Parallel&) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const KvRange freed =
        freed_columns(p.lengths[b], p.new_lengths[b], p.block_size, p.tables.columns);
    const int64_t first = b * p.tables.columns;
    int64_t out = first;
    for (int64_t i = freed.begin; i < freed.begin + freed.size; ++i) {
      const int64_t block = p.tables.at(b, i);
      if (block >= 0) p.blocks.set(out++, block);
      p.tables.set(b, i, -1);
    }
    p.num_freed[b] = static_cast<int32_t>(out - first);
    while (out < first + p.tables.columns) p.blocks.set(out++, -1);
    p.lengths.set(b, truncated_length(p.lengths[b], p.new_lengths[b]));
  }
}

}  // namespace specdec::cpu
