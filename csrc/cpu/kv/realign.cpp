#include "cpu/kv/slots.h"
#include "specdec/kv_realign.h"

namespace specdec::cpu {
namespace {

void move_slots(const KvTensor& t, int64_t b, int64_t h, const KvShift& shift) {
  if (shift.size <= 0) return;
  const int64_t by = shift.direction * shift.step;
  if (t.cache_stride.slot == t.entry_bytes) {
    char* const from = slot_address(t, b, h, shift.slots(shift.size).begin);
    std::memmove(from + by * t.entry_bytes, from, static_cast<size_t>(shift.size * t.entry_bytes));
    return;
  }
  for (int64_t d = shift.size - 1; d >= 0; --d) {
    char* const from = slot_address(t, b, h, shift.slot(d));
    std::memcpy(from + by * t.cache_stride.slot, from, static_cast<size_t>(t.entry_bytes));
  }
}

}  // namespace

void kv_realign(const KvRealignParams& p, const Parallel& parallel) {
  const auto shift_of = [&](const KvTensor& t, int64_t b) {
    return realigned(p.starts[b], p.lengths[b], p.shifts[b], t.slots);
  };
  each_head(
      p, parallel, [&](const KvTensor& t, int64_t b) { return shift_of(t, b).size; },
      [&](const KvTensor& t, int64_t b, int64_t h) {
        const KvShift shift = shift_of(t, b);
        move_slots(t, b, h, shift);
        if (p.zero_fill) zero_slots(t, b, h, shift.slots(shift.vacated));
      });
}

}  // namespace specdec::cpu
