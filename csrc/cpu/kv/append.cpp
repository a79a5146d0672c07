#include <algorithm>
#include <cstring>

#include "cpu/kv/slots.h"
#include "specdec/kv.h"

namespace specdec::cpu {
namespace {

const char* entry_address(const KvTensor& t, int64_t b, int64_t h, int64_t j) {
  return t.entries + b * t.entry_stride.sequence + h * t.entry_stride.head +
         j * t.entry_stride.slot;
}

void copy_entries(const KvTensor& t, int64_t b, int64_t h, int64_t position, KvRange entries) {
  if (entries.size <= 0) return;
  char* to = slot_address(t, b, h, position + entries.begin);
  const char* from = entry_address(t, b, h, entries.begin);
  if (t.cache_stride.slot == t.entry_bytes && t.entry_stride.slot == t.entry_bytes) {
    std::memcpy(to, from, entries.size * t.entry_bytes);
    return;
  }
  for (int64_t j = 0; j < entries.size; ++j) {
    std::memcpy(to + j * t.cache_stride.slot, from + j * t.entry_stride.slot, t.entry_bytes);
  }
}

}  // namespace

void kv_append(const KvAppendParams& p, const Parallel& parallel) {
  // Threads share the entries of all caches, so that one long sequence keeps them as busy as many.
  int64_t entries = 0, bytes = 0;
  for (int64_t i = 0; i < p.num_tensors; ++i) {
    const KvTensor& t = p.tensors[i];
    entries += p.batch * t.heads * t.count;
    bytes += p.batch * t.heads * t.count * t.entry_bytes;
  }
  const Parallel threads = worth_threads(bytes) ? parallel : serial();
  threads(entries, [&](int64_t from, int64_t to) {
    for_each_head(
        p.tensors, p.batch, from, to, [](const KvTensor& t) { return t.count; },
        [&](const KvTensor& t, int64_t b, int64_t h, int64_t first, int64_t size) {
          const int64_t position = p.positions[b];
          const KvRange kept = kept_entries(position, t.count, t.slots);
          const int64_t begin = std::max(first, kept.begin);
          const int64_t end = std::min(first + size, kept.begin + kept.size);
          copy_entries(t, b, h, position, {begin, end - begin});
        });
  });
}

}  // namespace specdec::cpu
