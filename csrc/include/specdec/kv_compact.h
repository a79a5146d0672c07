#pragma once
// Compaction of a cache along the accepted path of a token tree: the token in slot base + path[j]
// moves to slot base + j.
#include "specdec/kv.h"

namespace specdec {

// Node ids of the accepted paths.
struct KvPath {
  const void* nodes;  // [B, length], int64 if wide, else int32
  bool wide;
  int64_t sequence_stride, node_stride;  // elements
  int64_t length;

  SPECDEC_HD int64_t node(int64_t b, int64_t j) const {
    const int64_t at = b * sequence_stride + j * node_stride;
    return wide ? static_cast<const int64_t*>(nodes)[at] : static_cast<const int32_t*>(nodes)[at];
  }
};

// Slots of a cache [B, H, S, D].
struct DenseSlots {
  SPECDEC_HD int64_t count(const KvTensor& t) const { return t.slots; }
  SPECDEC_HD bool locate(const KvTensor& t, int64_t b, int64_t slot, int64_t* bytes) const {
    *bytes = b * t.cache_stride.sequence + slot * t.cache_stride.slot;
    return true;
  }
};

// Slots of a cache [num_blocks, block_size, H, D].
struct PagedSlots {
  static constexpr int64_t kMostSlots = 0xffffffff;
  KvTable<const int32_t> blocks;
  int64_t num_blocks;

  // Of 32 bits, which is more than any sequence has: on devices a division of 64 is a call, and
  // registers spill around it.
  SPECDEC_HD int64_t count(const KvTensor& t) const {
    const int64_t slots = blocks.columns * t.slots;
    return slots < kMostSlots ? slots : kMostSlots;
  }
  SPECDEC_HD bool locate(const KvTensor& t, int64_t b, int64_t slot, int64_t* bytes) const {
    const int64_t size = t.slots < kMostSlots ? t.slots : kMostSlots;
    const int64_t column = static_cast<uint32_t>(slot) / static_cast<uint32_t>(size);
    const int64_t block = blocks.at(b, column);
    *bytes = block * t.cache_stride.sequence + (slot - column * t.slots) * t.cache_stride.slot;
    return block >= 0 && block < num_blocks;
  }
};

struct KvMove {
  int64_t from, to;  // bytes from the start of a head
};

// The moves of one sequence in one cache. As path[j] >= j, no slot is read after it was written:
// what the moves before j wrote lies below j.
template <class Slots>
struct PathMoves {
  const Slots& slots;
  const KvPath& path;
  const KvTensor& tensor;
  int64_t b, base;
  int64_t room;  // nodes below it have a slot
  int64_t j = 0;

  SPECDEC_HD PathMoves(const Slots& slots, const KvPath& path, const KvTensor& tensor, int64_t b,
                       int64_t base)
      : slots(slots),
        path(path),
        tensor(tensor),
        b(b),
        base(base),
        room(base < 0 ? 0 : slots.count(tensor) - base) {}

  // False where the path ends. What is in place already is passed over.
  SPECDEC_HD bool next(KvMove* move) {
    while (j < path.length) {
      const int64_t node = path.node(b, j);
      if (node < j || node >= room || !slots.locate(tensor, b, base + node, &move->from) ||
          !slots.locate(tensor, b, base + j, &move->to)) {
        j = path.length;
        return false;
      }
      if (node != j++) return true;
    }
    return false;
  }
};

struct KvCompactParams {
  const KvTensor* tensors;  // [num_tensors], on the host
  int64_t num_tensors;
  int64_t batch;
  KvVector<const int64_t> base;  // the slot of node 0
  KvPath path;
};

struct PagedCompactParams {
  KvCompactParams compact;
  PagedSlots slots;
};

namespace cpu {
void kv_compact(const KvCompactParams& p, const Parallel& parallel);
void paged_compact(const PagedCompactParams& p, const Parallel& parallel);
}  // namespace cpu

// As in kv.h.
namespace cuda {
int kv_compact(const KvCompactParams& p, void* stream);
int paged_compact(const PagedCompactParams& p, void* stream);
}  // namespace cuda

}  // namespace specdec
