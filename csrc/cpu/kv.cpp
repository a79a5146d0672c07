#include "specdec/kv.h"

#include <algorithm>
#include <cstring>

namespace specdec {
namespace {

// For fewer bytes a thread costs more to wake than its share of the copy takes.
bool worth_threads(int64_t bytes) { return bytes >= 1024 * 1024; }

char* slot_address(const KvTensor& t, int64_t b, int64_t h, int64_t slot) {
  return t.cache + b * t.cache_stride.sequence + h * t.cache_stride.head +
         slot * t.cache_stride.slot;
}

const char* entry_address(const KvTensor& t, int64_t b, int64_t h, int64_t j) {
  return t.entries + b * t.entry_stride.sequence + h * t.entry_stride.head +
         j * t.entry_stride.slot;
}

void copy_rows(const KvTensor& t, int64_t b, int64_t h, int64_t position, KvRange entries) {
  if (entries.size <= 0) return;
  char* to = slot_address(t, b, h, position + entries.begin);
  const char* from = entry_address(t, b, h, entries.begin);
  if (t.cache_stride.slot == t.row_bytes && t.entry_stride.slot == t.row_bytes) {
    std::memcpy(to, from, entries.size * t.row_bytes);
    return;
  }
  for (int64_t j = 0; j < entries.size; ++j) {
    std::memcpy(to + j * t.cache_stride.slot, from + j * t.entry_stride.slot, t.row_bytes);
  }
}

void zero_rows(const KvTensor& t, int64_t b, int64_t h, KvRange slots) {
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

}  // namespace

void kv_append_cpu(const KvAppendParams& p, const Parallel& parallel) {
  // One interval of rows over all caches: few long sequences feed the threads as well as many.
  int64_t rows = 0, bytes = 0;
  for (int64_t i = 0; i < p.num_tensors; ++i) {
    const KvTensor& t = p.tensors[i];
    rows += p.batch * t.heads * t.count;
    bytes += p.batch * t.heads * t.count * t.row_bytes;
  }
  const Parallel threads = worth_threads(bytes) ? parallel : serial();
  threads(rows, [&](int64_t begin, int64_t end) {
    for_each_head(
        p.tensors, p.batch, begin, end, [](const KvTensor& t) { return t.count; },
        [&](const KvTensor& t, int64_t b, int64_t h, int64_t row, int64_t size) {
          const int64_t position = p.positions[b];
          const KvRange kept = kept_entries(position, t.count, t.slots);
          const int64_t first = std::max(row, kept.begin);
          const int64_t last = std::min(row + size, kept.begin + kept.size);
          copy_rows(t, b, h, position, {first, last - first});
        });
  });
}

void kv_truncate_cpu(const KvTruncateParams& p, const Parallel& parallel) {
  if (p.zero_fill) {
    int64_t heads = 0, bytes = 0;
    for (int64_t i = 0; i < p.num_tensors; ++i) {
      const KvTensor& t = p.tensors[i];
      heads += p.batch * t.heads;
      for (int64_t b = 0; b < p.batch; ++b) {
        const KvRange dropped = dropped_slots(p.lengths[b], p.new_lengths[b], t.slots);
        bytes += t.heads * t.row_bytes * dropped.size;
      }
    }
    const Parallel threads = worth_threads(bytes) ? parallel : serial();
    threads(heads, [&](int64_t begin, int64_t end) {
      for_each_head(
          p.tensors, p.batch, begin, end, [](const KvTensor&) { return 1; },
          [&](const KvTensor& t, int64_t b, int64_t h, int64_t, int64_t) {
            zero_rows(t, b, h, dropped_slots(p.lengths[b], p.new_lengths[b], t.slots));
          });
    });
  }
  // Last: zeroing needs the old lengths.
  for (int64_t b = 0; b < p.batch; ++b) {
    p.lengths[b] = truncated_length(p.lengths[b], p.new_lengths[b]);
  }
}

}  // namespace specdec
