#pragma once
// The slots of a sequence in a paged cache.
#include "specdec/kv.h"

namespace specdec {

// Finds the slots of a sequence in a cache [num_blocks, block_size, H, D].
struct PagedSlots {
  static constexpr int64_t kMostSlots = 0xffffffff;
  KvTable<const void> blocks;
  int64_t num_blocks;

  // Slot numbers are limited to 32 bits, which no sequence exceeds: on GPUs a 64-bit division is a
  // function call, and registers are spilled around it.
  SPECDEC_HD int64_t count(const KvTensor& t) const {
    // An expanded table has any number of columns: two factors of 32 bits do not overflow.
    const uint64_t slots = static_cast<uint64_t>(at_most(blocks.columns)) * at_most(t.slots);
    return slots < kMostSlots ? static_cast<int64_t>(slots) : kMostSlots;
  }
  SPECDEC_HD bool locate(const KvTensor& t, int64_t b, int64_t slot, int64_t* bytes) const {
    const int64_t size = at_most(t.slots);
    const int64_t column = static_cast<uint32_t>(slot) / static_cast<uint32_t>(size);
    const int64_t block = blocks.at(b, column);
    if (block < 0 || block >= num_blocks) return false;
    *bytes = block * t.cache_stride.sequence + (slot - column * t.slots) * t.cache_stride.slot;
    return true;
  }
  static SPECDEC_HD int64_t at_most(int64_t n) { return n < kMostSlots ? n : kMostSlots; }
};

}  // namespace specdec
