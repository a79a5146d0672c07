#pragma once
// Shared by the CPU kernels of the cache ops: addresses of slots, loops over the heads of a list of
// caches on several threads, and zeroing. A slot is one token's place in a cache; its entry is what
// one head keeps there, `entry_bytes` long.
#include <algorithm>
#include <cstring>

#include "specdec/kv.h"

namespace specdec::cpu {

// Below this size, waking threads takes longer than the copy.
inline bool worth_threads(int64_t bytes) { return bytes >= 1024 * 1024; }

inline char* slot_address(const KvTensor& t, int64_t b, int64_t h, int64_t slot) {
  return t.cache + b * t.cache_stride.sequence + h * t.cache_stride.head +
         slot * t.cache_stride.slot;
}

inline void zero_slots(const KvTensor& t, int64_t b, int64_t h, KvRange slots) {
  if (slots.size <= 0) return;
  char* to = slot_address(t, b, h, slots.begin);
  if (t.cache_stride.slot == t.entry_bytes) {
    std::memset(to, 0, slots.size * t.entry_bytes);
    return;
  }
  for (int64_t s = 0; s < slots.size; ++s)
    std::memset(to + s * t.cache_stride.slot, 0, t.entry_bytes);
}

// The entries of all caches are numbered in the order (tensor, b, h, slot), with slots_of(tensor)
// entries for each head. Calls run(tensor, b, h, first, size) for the heads that the interval
// [begin, end) of these numbers meets.
template <class SlotsOf, class Run>
void for_each_head(const KvTensor* tensors, int64_t batch, int64_t begin, int64_t end,
                   SlotsOf slots_of, Run run) {
  for (const KvTensor* t = tensors; begin < end; ++t) {
    const int64_t slots = slots_of(*t), total = batch * t->heads * slots;
    for (int64_t i = begin; i < std::min(end, total);) {
      const int64_t head = i / slots, first = i % slots, size = std::min(slots - first, end - i);
      run(*t, head / t->heads, head % t->heads, first, size);
      i += size;
    }
    begin = std::max<int64_t>(begin - total, 0);
    end -= total;
  }
}

// Calls run(tensor, b, h) for every head of every cache; slots_of(tensor, b) says how many of its
// slots are written, which decides whether threads pay.
template <class OpParams, class SlotsOf, class Run>
void each_head(const OpParams& p, const Parallel& parallel, SlotsOf slots_of, Run run) {
  int64_t heads = 0, bytes = 0;
  for (int64_t i = 0; i < p.num_tensors; ++i) {
    const KvTensor& t = p.tensors[i];
    heads += p.batch * t.heads;
    for (int64_t b = 0; b < p.batch; ++b) bytes += t.heads * t.entry_bytes * slots_of(t, b);
  }
  const Parallel threads = worth_threads(bytes) ? parallel : serial();
  threads(heads, [&](int64_t begin, int64_t end) {
    for_each_head(
        p.tensors, p.batch, begin, end, [](const KvTensor&) { return 1; },
        [&](const KvTensor& t, int64_t b, int64_t h, int64_t, int64_t) { run(t, b, h); });
  });
}

// Zeroes the slots dropped(length, new_length, slots) of each sequence. In a ring buffer this range
// may wrap around from the last slot to the first.
template <KvRange (*dropped)(int64_t, int64_t, int64_t), class OpParams>
void zero_dropped(const OpParams& p, const Parallel& parallel) {
  if (!p.zero_fill) return;
  const auto of = [&](const KvTensor& t, int64_t b) {
    return dropped(p.lengths[b], p.new_lengths[b], t.slots);
  };
  each_head(
      p, parallel, [&](const KvTensor& t, int64_t b) { return of(t, b).size; },
      [&](const KvTensor& t, int64_t b, int64_t h) {
        const KvRange slots = of(t, b);
        const int64_t before_end = std::min(slots.size, t.slots - slots.begin);
        zero_slots(t, b, h, {slots.begin, before_end});
        zero_slots(t, b, h, {0, slots.size - before_end});
      });
}

}  // namespace specdec::cpu
