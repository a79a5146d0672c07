#include "specdec/kv_compact.h"

#include <cstring>
#include <vector>

#include "cpu/kv_rows.h"

namespace specdec {
namespace {

template <class Slots>
void compact(const KvCompactParams& p, const Slots& slots, const Parallel& parallel) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < p.num_tensors; ++i) {
    bytes += p.batch * p.path.length * p.tensors[i].heads * p.tensors[i].row_bytes;
  }
  const Parallel threads = worth_threads(bytes) ? parallel : serial();
  threads(p.num_tensors * p.batch, [&](int64_t begin, int64_t end) {
    std::vector<KvMove> moves;
    for (int64_t i = begin; i < end; ++i) {
      const KvTensor& t = p.tensors[i / p.batch];
      const int64_t b = i % p.batch;
      PathMoves<Slots> walk(slots, p.path, t, b, p.base[b]);
      moves.clear();
      for (KvMove move; walk.next(&move);) moves.push_back(move);
      for (int64_t h = 0; h < t.heads; ++h) {
        char* const head = t.cache + h * t.cache_stride.head;
        for (const KvMove& move : moves) {
          std::memcpy(head + move.to, head + move.from, static_cast<size_t>(t.row_bytes));
        }
      }
    }
  });
}

}  // namespace

void kv_compact_cpu(const KvCompactParams& p, const Parallel& parallel) {
  compact(p, DenseSlots{}, parallel);
}

void paged_compact_cpu(const PagedCompactParams& p, const Parallel& parallel) {
  compact(p.compact, p.slots, parallel);
}

}  // namespace specdec
