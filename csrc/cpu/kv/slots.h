#pragma once
// What the cache kernels share: when threads pay, where a slot lies, the rows of a list of caches,
// and their zeroing.
#include <algorithm>
#include <cstring>

#include "specdec/kv.h"

namespace specdec::cpu {

// For fewer bytes a thread costs more to wake than its share of the copy takes.
inline bool worth_threads(int64_t bytes) { return bytes >= 1024 * 1024; }

inline char* slot_address(const KvTensor& t, int64_t b, int64_t h, int64_t slot) {
  return t.cache + b * t.cache_stride.sequence + h * t.cache_stride.head +
         slot * t.cache_stride.slot;
}

inline void zero_rows(const KvTensor& t, int64_t b, int64_t h, KvRange slots) {
  if (slots.size <= 0) return;
  char* to = slot_address(t, b, h, slots.begin);
  if (t.cache_stride.slot == t.row_bytes) {
    std::memset(to, 0, slots.size * t.row_bytes);
    return;
  }
  for (int64_t s = 0; s < slots.size; ++s)
    std::memset(to + s * t.cache_stride.slot, 0, t.row_bytes);
}

// Calls run(tensor, b, h, first, size) for the parts of [begin, end), an interval of the rows
// (tensor, b, h, row) in this order, `rows_of(tensor)` rows a head.
template <class RowsOf, class Run>
void for_each_head(const KvTensor* tensors, int64_t batch, int64_t begin, int64_t end,
                   RowsOf rows_of, Run run) {
  for (const KvTensor* t = tensors; begin < end; ++t) {
    const int64_t rows = rows_of(*t), total = batch * t->heads * rows;
    for (int64_t i = begin; i < std::min(end, total);) {
      const int64_t head = i / rows, row = i % rows, size = std::min(rows - row, end - i);
      run(*t, head / t->heads, head % t->heads, row, size);
      i += size;
    }
    begin = std::max<int64_t>(begin - total, 0);
    end -= total;
  }
}

// run(tensor, b, h) for every head of every cache; rows_of(tensor, b) is how many rows of it move.
template <class OpParams, class RowsOf, class Run>
void each_head(const OpParams& p, const Parallel& parallel, RowsOf rows_of, Run run) {
  int64_t heads = 0, bytes = 0;
  for (int64_t i = 0; i < p.num_tensors; ++i) {
    const KvTensor& t = p.tensors[i];
    heads += p.batch * t.heads;
    for (int64_t b = 0; b < p.batch; ++b) bytes += t.heads * t.row_bytes * rows_of(t, b);
  }
  const Parallel threads = worth_threads(bytes) ? parallel : serial();
  threads(heads, [&](int64_t begin, int64_t end) {
    for_each_head(
        p.tensors, p.batch, begin, end, [](const KvTensor&) { return 1; },
        [&](const KvTensor& t, int64_t b, int64_t h, int64_t, int64_t) { run(t, b, h); });
  });
}

// Zeroes dropped(length, new_length, slots), which may go on from the last slot to the first.
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
        zero_rows(t, b, h, {slots.begin, before_end});
        zero_rows(t, b, h, {0, slots.size - before_end});
      });
}

}  // namespace specdec::cpu
