#pragma once
// How a launch shares its work among groups: schedule, number and size of groups, splits of a row.
#include <algorithm>

#include "cuda/cuda_plan.h"
#include "cuda/row/tile.cuh"
#include "specdec/verification.h"

namespace specdec::cuda {

constexpr int kMaxGroupSize = 8;

// What is known of a device and a kernel.
struct Device {
  int processors;
  int blocks;     // that run at once on it
  bool clusters;  // whether it has thread-block clusters
  // How many groups of each size run at once; 0 for sizes that the device does not have.
  // They are fewer than the multiprocessors suggest, because a cluster must fit within one GPU
  // processing cluster, and the processing clusters of one and the same product differ in size.
  int groups[kMaxGroupSize + 1];
};

inline int64_t round_up(int64_t bytes) { return (bytes + 15) / 16 * 16; }

inline int64_t warp_tiles_of(int64_t vocab) { return (vocab + kWarpTile - 1) / kWarpTile; }

// The warp tiles of a target or draft row, whichever is longer.
inline int64_t warp_tiles_of(const VerifyParams& p) {
  return warp_tiles_of(std::max(p.vocab, p.draft.vocab));
}

// Whether the best entry of a row may be needed, by Gumbel-max sampling or as the maximum.
inline bool needs_best(const SamplingParams& s, bool gumbel) {
  return gumbel || s.temperatures != nullptr || s.temperature == 0;
}

// Whether some sequence may have a filter.
inline bool may_filter(const SamplingParams& s, int64_t vocab) {
  return s.top_ks != nullptr || s.top_ps != nullptr || s.min_ps != nullptr ||
         SequenceParams{1, s.top_k, s.top_p, s.min_p}.filters(vocab);
}

// What a launch has to do.
struct Work {
  int64_t sequences;
  int64_t rows;                // of each sequence
  int64_t warp_tiles;          // of a row
  bool reads_again;            // the last group reads rows a second time: a larger group pays
  bool tests_at_once = false;  // the last group tests all drafts side by side
  bool drafts = false;         // a row is read beside one of the draft, by other warps
};

// Row-lazy stops at the first rejection, which is after half of the rows or so, but has at most
// eight blocks for a sequence, and the sequence with most accepted drafts sets its time.
// Row-parallel pays
//   with one row for each sequence, until the device is full: nothing is read in vain;
//   if the last group decides fast, as long as one row of all sequences is half a wave of groups or
//   less: with up to 33 sequences on 132 multiprocessors (docs/benchmarks.md#on-an-h200);
//   else if row-lazy would leave half of the device idle or more, with up to 8 sequences: then rows
//   read in vain, or what the last group does alone, cost less than that.
inline bool row_parallel_pays(const Device& device, const Work& work) {
  const int64_t busy = work.sequences * kMaxGroupSize;
  if (work.rows == 1 && !work.reads_again) return busy < device.blocks;
  if (work.rows > 1 && work.tests_at_once) return 2 * busy <= device.blocks;
  return busy * 2 <= device.processors;
}

inline CudaPlan make_plan(const CudaRequest& request, const Device& device, const Work& work) {
  const int64_t sequences = work.sequences, rows = work.rows;
  // Blocks that one pass over a row keeps busy.
  const int64_t whole_row = (work.warp_tiles + kWarps - 1) / kWarps;
  CudaPlan plan = {};
  if (sequences * rows == 0) return plan;
  // The largest group of which so many run at once. Every size counts: if the next one below 8 were
  // 4, a device that runs 31 groups of 8 would leave half of its blocks idle with 32 sequences.
  const auto largest_group = [&](int64_t at_once) {
    auto size = static_cast<int>(std::clamp<int64_t>(whole_row, 1, kMaxGroupSize));
    while (size > 1 && device.groups[size] < at_once) --size;
    return size;
  };
  // The last group to finish reads rows again by itself, so that it should not be much smaller than
  // it can be; if that takes a second wave of groups, so be it.
  const auto largest_group_of_rows = [&] {
    const int at_once = largest_group(sequences * rows), largest = largest_group(1);
    return at_once * 2 >= largest ? at_once : largest;
  };
  // A ticket counts the groups of a sequence in 16 bits.
  const int64_t most_splits = 0xffff / rows;
  plan.parallel =
      most_splits > 0 &&
      (request.schedule == Schedule::kParallel ||
       (request.schedule == Schedule::kAuto && whole_row > 1 && row_parallel_pays(device, work)));
  int size = !plan.parallel     ? largest_group(sequences)
             : work.reads_again ? largest_group_of_rows()
                                : 1;
  if (request.group_size > 0) {
    for (size = request.group_size; size > 1 && device.groups[size] == 0;) --size;
  }
  plan.group_size = size;
  const int64_t room = std::max(1, device.groups[size]);
  if (!plan.parallel) {
    plan.splits = 1;
    plan.groups = std::min(sequences, room);
    return plan;
  }
  const int64_t share = room / (sequences * rows), warps = kWarps * plan.group_size;
  // A further split would have nothing to read.
  const int64_t useful = (work.warp_tiles * (work.drafts ? 2 : 1) + warps - 1) / warps;
  plan.splits = static_cast<int32_t>(std::max<int64_t>(1, std::min({share, useful, most_splits})));
  plan.groups = sequences * rows * plan.splits;
  if (request.schedule == Schedule::kAuto && rows == 1 && plan.splits == 1) {
    // A group that shares its row with no other needs no ticket.
    return make_plan({Schedule::kLazy, request.group_size}, device, work);
  }
  return plan;
}

}  // namespace specdec::cuda
