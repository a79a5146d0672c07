#include "specdec/paged_append.h"

#include <algorithm>
#include <cstring>

#include "cpu/kv/slots.h"

namespace specdec::cpu {
namespace {

void copy_token(const PagedAppendParams& p, const KvTensor& t, int64_t b, int64_t entry) {
  int64_t place;
  if (!p.slots.locate(t, b, p.positions[b] + entry, &place)) return;
  char* to = t.cache + place;
  const char* from = t.entries + b * t.entry_stride.sequence + entry * t.entry_stride.slot;
  for (int64_t h = 0; h < t.heads; ++h) {
    std::memcpy(to + h * t.cache_stride.head, from + h * t.entry_stride.head,
                static_cast<size_t>(t.entry_bytes));
  }
}

}  // namespace

void paged_append(const PagedAppendParams& p, const Parallel& parallel) {
  // Threads share the tokens of all caches, so that one long sequence keeps them as busy as many.
  int64_t tokens = 0, bytes = 0;
  for (int64_t i = 0; i < p.num_tensors; ++i) {
    const KvTensor& t = p.tensors[i];
    tokens += p.batch * t.count;
    bytes += p.batch * t.count * t.heads * t.entry_bytes;
  }
  const Parallel threads = worth_threads(bytes) ? parallel : serial();
  threads(tokens, [&](int64_t from, int64_t to) {
    for (const KvTensor* t = p.tensors; from < to; ++t) {
      const int64_t total = p.batch * t->count;
      for (int64_t i = from; i < std::min(to, total);) {
        const int64_t b = i / t->count, first = i % t->count;
        const int64_t size = std::min(t->count - first, to - i);
        const KvRange kept = p.kept(*t, b);
        const int64_t end = std::min(first + size, kept.begin + kept.size);
        for (int64_t j = std::max(first, kept.begin); j < end; ++j) copy_token(p, *t, b, j);
        i += size;
      }
      from = std::max<int64_t>(from - total, 0);
      to -= total;
    }
  });
}

}  // namespace specdec::cpu
