#pragma once
// Parameters of kv_compact_ and paged_compact_, which compact a cache along the accepted path of a
// token tree: the token in slot base + path[j] moves to slot base + j.
#include "specdec/kv.h"
#include "specdec/paged_slots.h"

namespace specdec {

// Finds the slots of a sequence in a cache [B, H, S, D].
struct DenseSlots {
  SPECDEC_HD int64_t count(const KvTensor& t) const { return t.slots; }
  SPECDEC_HD bool locate(const KvTensor& t, int64_t b, int64_t slot, int64_t* bytes) const {
    *bytes = b * t.cache_stride.sequence + slot * t.cache_stride.slot;
    return true;
  }
};

struct KvMove {
  int64_t from, to;  // bytes from the start of a head
};

// Iterates over the moves of one sequence in one cache. No slot is read after it was written: move
// j reads slot path[j] >= j, and the moves before it wrote slots below j.
template <class Slots>
struct PathMoves {
  const Slots& slots;
  const KvTable<const void>& path;
  const KvTensor& tensor;
  int64_t b, base;
  int64_t room;  // nodes in [0, room) have a slot
  int64_t j = 0;

  SPECDEC_HD PathMoves(const Slots& slots, const KvTable<const void>& path, const KvTensor& tensor,
                       int64_t b, int64_t base)
      : slots(slots),
        path(path),
        tensor(tensor),
        b(b),
        base(base),
        room(base < 0 ? 0 : slots.count(tensor) - base) {}

  // Returns false at the end of the path. Tokens that are in place already are skipped.
  SPECDEC_HD bool next(KvMove* move) {
    while (j < path.columns) {
      const int64_t node = path.at(b, j);
      if (node < j || node >= room || !slots.locate(tensor, b, base + node, &move->from) ||
          !slots.locate(tensor, b, base + j, &move->to)) {
        j = path.columns;
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
  KvVector<const void> base;  // the slot of node 0
  KvTable<const void> path;   // node ids
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
