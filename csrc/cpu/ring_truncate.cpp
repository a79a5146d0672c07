#include "specdec/ring_truncate.h"

#include "cpu/kv_rows.h"

namespace specdec {

void ring_truncate_cpu(const RingTruncateParams& p, const Parallel& parallel) {
  if (p.zero_fill) {
    int64_t heads = 0, bytes = 0;
    for (int64_t i = 0; i < p.num_tensors; ++i) {
      const KvTensor& t = p.tensors[i];
      heads += p.batch * t.heads;
      for (int64_t b = 0; b < p.batch; ++b) {
        const KvRange dropped = dropped_tokens(p.lengths[b], p.new_lengths[b], t.slots);
        bytes += t.heads * t.row_bytes * dropped.size;
      }
    }
    const Parallel threads = worth_threads(bytes) ? parallel : serial();
    threads(heads, [&](int64_t begin, int64_t end) {
      for_each_head(
          p.tensors, p.batch, begin, end, [](const KvTensor&) { return 1; },
          [&](const KvTensor& t, int64_t b, int64_t h, int64_t, int64_t) {
            const KvRange dropped = dropped_tokens(p.lengths[b], p.new_lengths[b], t.slots);
            const int64_t first = dropped.begin % t.slots;
            const int64_t before_end = std::min(dropped.size, t.slots - first);
            zero_rows(t, b, h, {first, before_end});
            zero_rows(t, b, h, {0, dropped.size - before_end});
          });
    });
  }
  // Last: zeroing needs the old lengths.
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = p.lengths[b], new_length = p.new_lengths[b];
    p.status[b] = window_is_lost(length, new_length, p.slots, p.window);
    p.lengths[b] = truncated_length(length, new_length);
  }
}

}  // namespace specdec
