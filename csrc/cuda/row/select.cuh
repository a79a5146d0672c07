#pragma once
// Filters by one block: the smallest logit that survives top-k, then top-p among the survivors,
// then min-p; ties survive. The block selects among the few entries that reach a bound, which it
// keeps in shared memory as candidates; only if they are too many for that does it count those of
// the row in bins. Afterwards all that happens to a filtered row happens among its survivors,
// unless these are too many, too.
#include "cuda/row/fill.cuh"

namespace specdec::cuda {

// Entries that a block selects among, and survivors in a list.
constexpr int kMostListed = 1024;
SPECDEC_HD constexpr int64_t most_listed(int64_t vocab) {
  return vocab < kMostListed ? vocab : kMostListed;
}

// A survivor in the list of a row, in no order.
struct Survivor {
  float value;
  int32_t id;
};

struct Candidates {
  static constexpr int kBinBits = 10, kBins = 1 << kBinBits;
  uint32_t keys[kMostListed];  // see ordered_key; or the number of entries in each bin
  int32_t ids[kMostListed];
  int64_t masses[kMostListed];  // or the mass of each bin
  uint32_t count;
  uint32_t found;
  int64_t above;
  int64_t total;  // mass of the survivors
};
static_assert(Candidates::kBins <= kMostListed, "bins lie where candidates do");

// The shared memory of a kernel, which the candidates follow where rows may have filters.
template <class Shared>
struct Filtered : Shared {
  Candidates candidates;
};
template <class Shared>
inline __device__ Candidates& candidates_of() {
  return shared_memory<Filtered<Shared>>()->candidates;
}
template <class Shared>
size_t shared_bytes(bool filters) {
  return filters ? sizeof(Filtered<Shared>) : sizeof(Shared);
}

// The sum over a warp of numbers that are not negative and add up to less than 2^63, in every lane.
inline __device__ int64_t warp_sum(int64_t value) {
  constexpr int kLimb = 22;
  constexpr int64_t kMask = (1 << kLimb) - 1;
  int64_t sum = 0;
#pragma unroll
  for (int limb = 2; limb >= 0; --limb) {
    const auto part = static_cast<unsigned>(value >> (limb * kLimb) & kMask);
    sum = (sum << kLimb) + __reduce_add_sync(kAllLanes, part);
  }
  return sum;
}

// The largest number of [low, high] such that the entries whose keys are at or above it weigh
// `need` or more, else `low`. `weights` is null if each weighs 1. For the whole block, which has
// written the keys and weights before a barrier.
inline SPECDEC_NOINLINE __device__ uint32_t largest_reaching(Candidates& c, const int64_t* weights,
                                                             int n, uint32_t low, uint32_t high,
                                                             int64_t need) {
  if (warp_id() == 0) {
#pragma unroll 1
    while (low < high) {
      const uint32_t middle = high - (high - low) / 2;
      int64_t sum = 0;
#pragma unroll 1
      for (int i = lane_id(); i < n; i += kLanes) {
        if (c.keys[i] >= middle) sum += weights == nullptr ? 1 : weights[i];
      }
      if (warp_sum(sum) >= need) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    if (lane_id() == 0) c.found = low;
  }
  __syncthreads();
  const uint32_t found = c.found;
  __syncthreads();
  return found;
}

// Calls visit(warp_tile) for each warp tile whose maximum reaches `low`, in some warp, and
// leave_out(warp_tile) for all others in one lane. Ends when `ends()`, which is the same in all
// lanes of a warp, says so.
template <class Visit, class LeaveOut, class Ends>
inline __device__ void for_warp_tiles(const TileStats& tile_stats, int64_t warp_tiles, float low,
                                      const Visit& visit, const LeaveOut& leave_out,
                                      const Ends& ends) {
  const auto tiles = static_cast<int>(warp_tiles);
#pragma unroll 1
  for (int first = warp_id(); first < tiles && !ends(); first += kThreads) {
    const int mine = first + lane_id() * kWarps;
    const bool reaches = mine < tiles && tile_stats.maxima[mine] >= low;
    if (mine < tiles && !reaches) leave_out(mine);
    unsigned left = __ballot_sync(kAllLanes, reaches);
#pragma unroll 1
    for (; left != 0 && !ends(); left &= left - 1) {
      visit(first + (__ffs(static_cast<int>(left)) - 1) * kWarps);
    }
  }
}
template <class Visit>
inline __device__ void for_warp_tiles(const TileStats& tile_stats, int64_t warp_tiles, float low,
                                      const Visit& visit) {
  for_warp_tiles(tile_stats, warp_tiles, low, visit, [](int) {}, [] { return false; });
}

// A row to be measured, in shared memory. A mask of allowed tokens and penalties will belong here.
struct RowTask : RowFill {
  SequenceParams params;
  Survivor* list;  // [most_listed(vocab)], null without filters
  Want want_of_survivors;
  bool filtered;
};

// Calls f(key, id) for each entry of a row at and above `low`.
template <class F, class Ends>
inline __device__ void for_entries(const RowView& row, const TileStats& tile_stats, uint32_t low,
                                   const F& f, const Ends& ends) {
  const auto visit = [&](int warp_tile) {
    TileValues tile = call_read_warp_tile(row, warp_tile);
#pragma unroll 1
    for (int q = 0; q < kQuads; ++q) {
      const int64_t id = int64_t{warp_tile} * kWarpTile + first_of_quad(row.wide(), q);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t key = ordered_key(tile.values[j]);
        // Entries beyond the end are -inf.
        if (key >= low && id + j < row.vocab) f(key, static_cast<int>(id) + j);
      }
      rotate(tile.values);
    }
  };
  for_warp_tiles(tile_stats, row.warp_tiles(), from_ordered_key(low), visit, [](int) {}, ends);
}

// Makes the entries at and above `low` the candidates. Returns false if they are too many. For the
// whole block.
inline __device__ bool gather(const RowTask& t, Candidates& c, uint32_t low) {
  __syncthreads();
  if (thread_id() == 0) c.count = 0;
  __syncthreads();
  for_entries(
      t.row, t.tile_stats, low,
      [&](uint32_t key, int id) {
        const uint32_t at = atomicAdd(&c.count, 1u);
        if (at >= kMostListed) return;
        c.keys[at] = key;
        c.ids[at] = id;
      },
      [&] { return __any_sync(kAllLanes, peek(&c.count) > kMostListed) != 0; });
  __syncthreads();
  return c.count <= kMostListed;
}

// What one block selects of a row.
class Selection {
 public:
  // All arguments lie in shared memory.
  __device__ Selection(ThreadBlock& block, Candidates& candidates, const RowTask& task,
                       const RowStats& stats)
      : block_(block),
        c_(candidates),
        task_(task),
        row_(task.row),
        tile_stats_(task.tile_stats),
        params_(task.params),
        stats_(stats) {}

  // Returns the threshold. Then `listed()` says whether the candidates are the survivors and others
  // below the threshold.
  __device__ float threshold() {
    const uint32_t highest = ordered_key(stats_.max);
    const bool top_k = params_.top_k > 0 && params_.top_k < row_.vocab;
    uint32_t low = ordered_key(-INFINITY);
    float threshold = -INFINITY;
    // Top-k, top-p, and the list of what survives these and min-p. One copy of the code serves all.
#pragma unroll 1
    for (int stage = 0; stage < 3; ++stage) {
      const bool by_mass = stage == 1;
      int64_t need = params_.top_k;
      if (stage == 0) {
        if (!top_k) continue;
        low = floor(highest);
      } else if (by_mass) {
        if (!(params_.top_p < 1)) continue;
        need = 0;  // the share top_p of the entries from `low` on
        if (!top_k) {
          low = cut();
          need = static_cast<int64_t>(ceil(params_.top_p * row_mass()));
        }
      } else {
        threshold = fmaxf(from_ordered_key(low),
                          min_p_threshold(stats_.max, params_.temperature, params_.min_p));
        low = ordered_key(threshold);
      }
      Interval in = {low, highest, 0, 0, true};
      bool fits = true;
#pragma unroll 1
      for (;;) {
        if (!listed_ && fits) listed_ = gather(task_, c_, in.low);
        if (stage == 2 || listed_ || in.low >= in.high) break;
        fits = narrow(by_mass, need, in);
      }
      if (stage == 2) break;
      low = in.low;
      if (listed_) low = select_among_candidates(by_mass, low, highest, need);
    }
    return threshold;
  }
  __device__ bool listed() const { return listed_; }

 private:
  // The k-th largest tile maximum is a lower bound, if there are so many: at least k entries reach
  // it.
  __device__ uint32_t floor(uint32_t high) {
    const int64_t tiles = row_.warp_tiles();
    const uint32_t lowest = ordered_key(-INFINITY);
    if (tiles > kMostListed) return lowest;
    for (int64_t i = thread_id(); i < tiles; i += kThreads) {
      c_.keys[i] = ordered_key(tile_stats_.maxima[i]);
    }
    __syncthreads();
    return largest_reaching(c_, nullptr, static_cast<int>(tiles), lowest, high, params_.top_k);
  }

  // Entries under (1-p)/V of the largest weight hold less than 1-p of the mass together.
  __device__ uint32_t cut() const {
    const double share = (1.0 - params_.top_p) / static_cast<double>(row_.vocab);
    const double cut = stats_.max + params_.temperature * log_of(share);
    return ordered_key(fmaxf(static_cast<float>(cut), -kLargest));
  }

  // The mass of the whole row in the units of `mass`.
  __device__ double row_mass() {
    const int64_t tiles = row_.warp_tiles();
    const TileRun run(tile_stats_, tiles);
    const WarpTileMasses masses(block_, tile_stats_, tiles, run, stats_.max,
                                inverse_temperature(params_.temperature));
    return masses.sum() * exp2_of(-double{tile_offset(stats_.max, rate_of(stats_.inv_t)).above}) *
           unit();
  }

  // Keys in which the one wanted lies, and what lies above them: its weight, and how many entries.
  struct Interval {
    uint32_t low, high;
    int64_t above, number_above;
    bool whole;  // nothing was narrowed yet
  };

  // The largest key such that the candidates at and above it are `need`, or weigh that. If `need`
  // is 0, it is the share top_p of all from `low` on.
  __device__ uint32_t select_among_candidates(bool by_mass, uint32_t low, uint32_t high,
                                              int64_t need) {
    const auto n = static_cast<int>(c_.count);
    if (by_mass) {
      int64_t mine = 0;
      for (int i = thread_id(); i < n; i += kThreads) {
        c_.masses[i] = c_.keys[i] >= low ? mass(c_.keys[i]) : 0;
        mine += c_.masses[i];
      }
      need = share_of(block_.sum(mine), need);
    }
    __syncthreads();
    return largest_reaching(c_, by_mass ? c_.masses : nullptr, n, low, high, need);
  }

  // Rounding may leave a need just unreached: then every entry seen survives.
  __device__ int64_t share_of(int64_t all, int64_t need) const {
    if (need == 0) {
      need = static_cast<int64_t>(ceil(params_.top_p * static_cast<double>(all)));
    }
    return need < all ? need : all;
  }

  // A pass over the row counts the keys of an interval in bins and narrows it to that of the key
  // wanted. Returns whether the entries from there on are few enough to gather.
  __device__ bool narrow(bool by_mass, int64_t& need, Interval& in) {
    const int width = 32 - __clz(static_cast<int>(in.high - in.low));
    const int shift = width > Candidates::kBinBits ? width - Candidates::kBinBits : 0;
    count_in_bins(in.low, in.high, shift);
    if (in.whole && by_mass) {
      int64_t mine = 0;
      for (int i = thread_id(); i < Candidates::kBins; i += kThreads) mine += c_.masses[i];
      need = share_of(block_.sum(mine), need);
    }
    in.whole = false;
    const auto bin = static_cast<int>(bin_reaching(by_mass, need - in.above));
    in.above += c_.above;
    in.number_above += number_from(bin + 1);
    const int64_t number = in.number_above + c_.keys[bin];
    in.low += static_cast<uint32_t>(bin) << shift;
    const uint32_t last = in.low + ((1u << shift) - 1);
    in.high = last < in.high ? last : in.high;
    __syncthreads();
    return number <= kMostListed;
  }

  __device__ void count_in_bins(uint32_t low, uint32_t high, int shift) {
    for (int i = thread_id(); i < Candidates::kBins; i += kThreads) {
      c_.keys[i] = 0;
      c_.masses[i] = 0;
    }
    __syncthreads();
    const auto add = [&](uint32_t key, int) {
      if (key > high) return;
      const uint32_t bin = (key - low) >> shift;
      atomicAdd(&c_.keys[bin], 1u);
      // A shared atomic of 64 bits is a loop on the device, one of 32 bits is not.
      auto* const halves = reinterpret_cast<unsigned*>(&c_.masses[bin]);
      const auto units = static_cast<uint64_t>(mass(key));
      const auto low_half = static_cast<unsigned>(units);
      const unsigned before = atomicAdd(halves, low_half);
      const unsigned carry = before + low_half < before ? 1 : 0;
      const unsigned high_half = static_cast<unsigned>(units >> 32) + carry;
      if (high_half != 0) atomicAdd(halves + 1, high_half);
    };
    for_entries(row_, tile_stats_, low, add, [] { return false; });
    __syncthreads();
  }

  // The bin in which the running weight from the top reaches `need`; `above` becomes that of the
  // bins over it.
  __device__ uint32_t bin_reaching(bool by_mass, int64_t need) {
    constexpr int kRun = Candidates::kBins / kThreads;
    const auto weight = [&](int bin) { return by_mass ? c_.masses[bin] : int64_t{c_.keys[bin]}; };
    const int top = Candidates::kBins - 1 - thread_id() * kRun;
    int64_t mine = 0, all;
    for (int i = 0; i < kRun; ++i) mine += weight(top - i);
    int64_t running = block_.sum_before(mine, all);
    if (running < need && need <= running + mine) {
      int bin = top;
      for (; running + weight(bin) < need; --bin) running += weight(bin);
      c_.found = static_cast<uint32_t>(bin);
      c_.above = running;
    }
    __syncthreads();
    return c_.found;
  }

  // The number of entries in the bins from `bin` on.
  __device__ int64_t number_from(int bin) {
    int64_t mine = 0;
    for (int i = bin + thread_id(); i < Candidates::kBins; i += kThreads) mine += c_.keys[i];
    return block_.sum(mine);
  }

  // Units of the largest weight: the sum over the row stays below 2^63.
  __device__ float unit() const {
    const int bits = 62 - ceil_log2(row_.vocab);
    return static_cast<float>(int64_t{1} << (bits < 50 ? bits : 50));
  }
  __device__ int64_t mass(uint32_t key) const {
    return static_cast<int64_t>(
        exp2_fast((from_ordered_key(key) - stats_.max) * rate_of(stats_.inv_t)) * unit());
  }

  ThreadBlock& block_;
  Candidates& c_;
  const RowTask& task_;
  const RowView& row_;
  const TileStats& tile_stats_;
  const SequenceParams& params_;
  const RowStats& stats_;
  bool listed_ = false;
};

// Computes the masses of the tiles of a row again for the survivors alone, and the best Gumbel
// scores, if wanted.
inline __device__ void filter_tile_stats(const RowView& row, const TileStats& tile_stats, Want want,
                                         float threshold, float rate, const GumbelNoise& noise) {
  const bool gumbel = want == Want::kGumbel;
  for_warp_tiles(
      tile_stats, row.warp_tiles(), threshold,
      [&](int warp_tile) {
        TileValues tile = call_read_warp_tile(row, warp_tile);
        weigh_tile(tile.values, tile_stats.maxima[warp_tile], rate, threshold);
        const int64_t units = warp_mass(lane_units(tile.values, row.wide()));
        const uint64_t best =
            gumbel ? warp_tile_gumbel(tile.values, row.wide(), warp_tile, noise) : 0;
        if (lane_id() != 0) return;
        tile_stats.units[warp_tile] = units;
        if (gumbel) tile_stats.best[warp_tile] = best;
      },
      [&](int warp_tile) {
        tile_stats.units[warp_tile] = 0;
        if (gumbel) tile_stats.best[warp_tile] = 0;
      },
      [] { return false; });
  __syncthreads();
}

}  // namespace specdec::cuda
