#pragma once
// Parameters of kv_compact_ and paged_compact_, which compact a cache along the accepted path of a
// token tree: the token in slot base + path[j] moves to slot base + j.
#include "specdec/kv.h"

namespace specdec {

// Node ids of the accepted paths.
struct KvPath {
  const void* nodes;  // [B, length] int64 or int32
  bool nodes_are_int64;
  int64_t sequence_stride, node_stride;  // elements
  int64_t length;

  SPECDEC_HD int64_t node(int64_t b, int64_t j) const {
    const int64_t at = b * sequence_stride + j * node_stride;
    return nodes_are_int64 ? static_cast<const int64_t*>(nodes)[at]
                           : static_cast<const int32_t*>(nodes)[at];
  }
};

// Finds the slots of a sequence in a cache [B, H, S, D].
struct DenseSlots {
  SPECDEC_HD int64_t count(const KvTensor& t) const { return t.slots; }
  SPECDEC_HD bool locate(const KvTensor& t, int64_t b, int64_t slot, int64_t* bytes) const {
    *bytes = b * t.cache_stride.sequence + slot * t.cache_stride.slot;
    return true;
  }
};

// Finds the slots of a sequence in a cache [num_blocks, block_size, H, D].
struct PagedSlots {
  static constexpr int64_t kMostSlots = 0xffffffff;
  KvTable<const int32_t> blocks;
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
    *bytes = block * t.cache_stride.sequence + (slot - column * t.slots) * t.cache_stride.slot;
    return block >= 0 && block < num_blocks;
  }
  static SPECDEC_HD int64_t at_most(int64_t n) { return n < kMostSlots ? n : kMostSlots; }
};

struct KvMove {
  int64_t from, to;  // bytes from the start of a head
};

// Iterates over the moves of one sequence in one cache. No slot is read after it was written: move
// j reads slot path[j] >= j, and the moves before it wrote slots below j.
template <class Slots>
struct PathMoves {
  const Slots& slots;
  const KvPath& path;
  const KvTensor& tensor;
  int64_t b, base;
  int64_t room;  // nodes in [0, room) have a slot
  int64_t j = 0;

  SPECDEC_HD PathMoves(const Slots& slots, const KvPath& path, const KvTensor& tensor, int64_t b,
                       int64_t base)
      : slots(slots),
        path(path),
        tensor(tensor),
        b(b),
        base(base),
        room(base < 0 ? 0 : slots.count(tensor) - base) {}

  // Returns false at the end of the path. Tokens that are in place already are skipped.
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

// As in kv.h: a cudaError_t, a cudaStream_t.
namespace cuda {
int kv_compact(const KvCompactParams& p, void* stream);
int paged_compact(const PagedCompactParams& p, void* stream);
}  // namespace cuda

}  // namespace specdec
