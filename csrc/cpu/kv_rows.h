#pragma once
// What the cache kernels share: when threads pay, where a slot lies, and the rows of a list of
// caches.
#include <algorithm>
#include <cstring>

#include "specdec/kv.h"

namespace specdec {

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

}  // namespace specdec
