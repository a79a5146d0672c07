#pragma once
// Which row a block of the first launch of a verifier measures, and how it opens that.
#include "cuda/row/residual.cuh"
#include "cuda/row/summary.cuh"
#include "cuda/ticket.cuh"

namespace specdec::cuda {

// Row i of a sequence, or the draft of its token, and which split of it.
struct RowUnit {
  int64_t b, i;
  bool is_draft;
  int split, splits;
};

// The unit of this block, from its place in the grid: rows 0 of all sequences come first, each
// beside its draft, and the last of the `rows` target rows, which have none, at the end.
inline __device__ RowUnit own_unit(int64_t batch, int64_t rows, bool targets, bool drafts,
                                   int splits) {
  const unsigned unit = blockIdx.x / static_cast<unsigned>(splits);
  const unsigned kinds = (targets ? 1 : 0) + (drafts ? 1 : 0),
                 sequences = static_cast<unsigned>(batch);
  const unsigned of_drafts = static_cast<unsigned>(rows - 1) * sequences * kinds;
  const bool last = unit >= of_drafts;
  const unsigned in_order = last ? unit - of_drafts : unit / kinds;
  return {in_order % sequences, last ? rows - 1 : in_order / sequences,
          !last && (!targets || unit % kinds == 1),
          static_cast<int>(blockIdx.x % static_cast<unsigned>(splits)), splits};
}

template <class Sequence>
struct UnitShared : BlockShared {
  Sequence sequence;
  RowTask task;
  RowSummary summary;
  RowUnit unit;
  int64_t slot;  // of the row's summary
  bool exists;
  Arrival arrival;
};

// Opens the unit's row, which is row `row` of the drafts or of the targets. `offset` is the place
// of its token after the first, `want` and `list` are those of a target row. For one thread.
__forceinline__ __device__ void open_unit(const VerifyParams& p, const SequenceState& s,
                                          const RowUnit& unit, int64_t row, int64_t offset,
                                          const TileStats& tile_stats, Want want, Survivor* list,
                                          RowTask& t) {
  const GumbelNoise noise = {s.seed, s.position + static_cast<uint64_t>(offset), kSharedStream};
  if (unit.is_draft) {
    return open_row(row_of(p.draft, s.b, row, Read::kLogits), tile_stats,
                    {s.draft_temperature, 0, 1, 0}, Want::kMass, false, noise, unit.split,
                    unit.splits, t);
  }
  open_row(target_row(p, s, row), tile_stats, s.params, want, s.filtered, noise, unit.split,
           unit.splits, t);
  t.list = list;
}

}  // namespace specdec::cuda
