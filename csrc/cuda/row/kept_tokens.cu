// The op kept_tokens on CUDA devices, in one launch: blocks that share a row compute the statistics
// of its warp tiles, and the last of them selects and sorts the tokens that it returns.
#include "cuda/launch.cuh"
#include "cuda/row/summary.cuh"
#include "cuda/ticket.cuh"
#include "specdec/kept_tokens.h"

namespace specdec::cuda {
namespace {

struct KeptJob {
  KeptTokensParams p;
  TileStatsArray tile_stats;    // [N]
  unsigned long long* tickets;  // [N]
  uint64_t launch_id;
  int splits;
};

struct KeptShared : BlockShared {
  static constexpr int kMostRanks = 2048;
  KeptRow at;
  RowTask task;
  RowSummary summary;
  Arrival arrival;
  uint32_t num_ranks;
  uint64_t ranks[kMostRanks];  // see rank_key
};
static_assert(kMostKept <= kMostListed, "the tokens that are returned may be candidates");
static_assert(kMostKept + kWarpTile <= KeptShared::kMostRanks, "see gather_ranks");

// Sorts the ranks. For the whole block.
__device__ void sort_ranks(KeptShared& s) {
  const auto n = static_cast<int>(s.num_ranks);
  int size = 1;
  while (size < n) size *= 2;
  for (int i = n + thread_id(); i < size; i += kThreads) s.ranks[i] = ~uint64_t{0};
  __syncthreads();
  // Bitonic (Batcher 1968).
#pragma unroll 1
  for (int length = 2; length <= size; length *= 2) {
#pragma unroll 1
    for (int step = length / 2; step > 0; step /= 2) {
#pragma unroll 1
      for (int i = thread_id(); i < size; i += kThreads) {
        const int other = i ^ step;
        if (other < i) continue;
        const uint64_t a = s.ranks[i], b = s.ranks[other];
        if ((a > b) != ((i & length) == 0)) continue;
        s.ranks[i] = b;
        s.ranks[other] = a;
      }
      __syncthreads();
    }
  }
}

// Ranks the candidates at and above a bound. For the whole block.
__device__ void rank_candidates(const Candidates& c, float bound, KeptShared& s) {
  const auto n = static_cast<int>(c.count);
  for (int i = thread_id(); i < n; i += kThreads) {
    if (!(from_ordered_key(c.keys[i]) >= bound)) continue;
    s.ranks[atomicAdd(&s.num_ranks, 1u)] = rank_key(c.keys[i], c.ids[i]);
  }
  __syncthreads();
}

// The first warp tile up to which so many entries tie with the bound that with those above it they
// are `most`. Overwrites the masses of the tiles. For the whole block.
__device__ int last_tile_of_ties(ThreadBlock& block, const RowTask& t, Candidates& c, float bound,
                                 int64_t most) {
  int64_t above = 0;
  for_warp_tiles(
      t.tile_stats, t.row.warp_tiles(), bound,
      [&](int warp_tile) {
        const TileValues tile = call_read_warp_tile(t.row, warp_tile);
        unsigned ties = 0;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          ties += tile.values[j] == bound ? 1 : 0;
          above += tile.values[j] > bound ? 1 : 0;
        }
        const unsigned all = __reduce_add_sync(kAllLanes, ties);
        if (lane_id() == 0) t.tile_stats.units[warp_tile] = all;
      },
      [&](int warp_tile) { t.tile_stats.units[warp_tile] = 0; }, [] { return false; });
  const int64_t need = most - block.sum(above);
  const TileRun run(t.tile_stats, t.row.warp_tiles());
  int64_t mine = 0, all;
  for (int i = run.begin; i < run.end; ++i) mine += t.tile_stats.units[i];
  int64_t running = block.sum_before(mine, all);
  if (running < need && need <= running + mine) {
    int i = run.begin;
    for (; running + t.tile_stats.units[i] < need; ++i) running += t.tile_stats.units[i];
    c.found = static_cast<uint32_t>(i);
  }
  __syncthreads();
  return static_cast<int>(c.found);
}

// Ranks the entries above a bound that less than `most` exceed, and those that tie with it in the
// tiles that may hold the first `most`. For the whole block.
__device__ void gather_ranks(ThreadBlock& block, Candidates& c, float bound, int64_t most,
                             KeptShared& s) {
  const RowTask& t = s.task;
  const int last = last_tile_of_ties(block, t, c, bound, most);
  const uint32_t low = ordered_key(bound);
  for_entries(
      t.row, t.tile_stats, low,
      [&](uint32_t key, int id) {
        if (key == low && id / kWarpTile > last) return;
        s.ranks[atomicAdd(&s.num_ranks, 1u)] = rank_key(key, id);
      },
      [] { return false; });
  __syncthreads();
}

// Ranks the `max_kept` likeliest tokens of a row that are kept, and some of those that follow;
// returns how many are kept. `listed` says that all of them are candidates. For the whole block.
__device__ int64_t rank_kept(ThreadBlock& block, Candidates& c, bool listed, int64_t max_kept,
                             KeptShared& s) {
  RowTask& t = s.task;
  const RowStats& stats = s.summary.stats;
  float bound = kept_threshold(stats.max, t.params.temperature, stats.threshold);
  int64_t count = 0;
  if (listed) {
    for (int i = thread_id(); i < static_cast<int>(c.count); i += kThreads) {
      count += from_ordered_key(c.keys[i]) >= bound ? 1 : 0;
    }
    count = block.sum(count);
  } else {
    count = sum_of_row(block, t, bound, [&](float l) { return int64_t{l >= bound}; });
    if (count <= kMostListed) {
      listed = gather(t, c, ordered_key(bound));
    } else {
      if (thread_id() == 0) t.params = {t.params.temperature, max_kept, 1, 0};
      __syncthreads();
      Selection largest(block, c, t, stats);
      bound = largest.threshold();
      listed = largest.listed();
    }
  }
  __syncthreads();
  if (listed) {
    rank_candidates(c, bound, s);
  } else {
    gather_ranks(block, c, bound, max_kept, s);
  }
  return count;
}

// Writes what is kept, which is `num` ranks. For the whole block.
__device__ void write(const KeptTokensParams& p, int64_t n, const KeptShared& s, int num,
                      int64_t count, int32_t status) {
  const int64_t first = n * p.max_kept;
  for (int i = thread_id(); i < p.max_kept; i += kThreads) {
    const bool some = i < num;
    p.ids[first + i] = some ? id_of_rank(s.ranks[i]) : -1;
    p.logprobs[first + i] =
        some ? static_cast<float>(s.summary.stats.logprob(logit_of_rank(s.ranks[i]))) : -INFINITY;
  }
  if (thread_id() != 0) return;
  p.counts[n] = static_cast<int32_t>(count);
  p.status[n] = status;
}

// Selects from a row whose tile statistics are complete. For the whole block.
__device__ void finish(ThreadBlock& block, const KeptJob& job, int64_t n, KeptShared& s) {
  const KeptTokensParams& p = job.p;
  Candidates& candidates = candidates_of<KeptShared>();
  summarise(block, s.task, candidates, s.summary);
  __syncthreads();
  const RowStats& stats = s.summary.stats;
  if (!stats.valid) return write(p, n, s, 0, 0, kept_fault(p, s.at));
  if (stats.one_hot) {
    if (thread_id() == 0) {
      s.ranks[0] = rank_key(ordered_key(stats.max), static_cast<int32_t>(s.summary.token));
    }
    __syncthreads();
    return write(p, n, s, 1, 1, 0);
  }
  if (thread_id() == 0) s.num_ranks = 0;
  __syncthreads();
  const int64_t count = rank_kept(block, candidates, s.summary.listed >= 0, p.max_kept, s);
  sort_ranks(s);
  const bool cut = count > p.max_kept;
  write(p, n, s, static_cast<int>(cut ? p.max_kept : count), count, cut ? kKeptCut : 0);
}

__global__ void __launch_bounds__(kThreads, kBlocksWithFewRegisters)
    kept_tokens_kernel(const __grid_constant__ KeptJob job) {
  auto& s = *shared_memory<KeptShared>();
  ThreadBlock block(s);
  const KeptTokensParams& p = job.p;
  const int64_t n = blockIdx.x / static_cast<unsigned>(job.splits);
  const auto split = static_cast<int>(blockIdx.x % static_cast<unsigned>(job.splits));
  if (thread_id() == 0) {
    begin_arrivals(job.tickets + n, job.launch_id, job.splits);
    s.at = open_kept_row(p, n);
    if (s.at.exists) {
      const SequenceParams& params = s.at.params;
      open_row(RowView(p.target, s.at.sequence, s.at.row, p.vocab, s.at.read), job.tile_stats[n],
               params, Want::kMass, params.temperature > 0 && params.filters(p.vocab), {}, split,
               job.splits, s.task);
    }
  }
  __syncthreads();
  if (!s.at.exists) {
    if (split == 0) write(p, n, s, 0, 0, s.at.status);
    return;
  }
  fill_tile_stats(s.task);
  if (arrive(s.arrival, job.tickets + n, job.splits, false).last) finish(block, job, n, s);
}

// Lays the arrays of a call out in its workspace; returns their size.
int64_t lay_out(KeptJob& job, char* workspace) {
  const KeptTokensParams& p = job.p;
  const int64_t rows = p.batch * p.rows_each;
  Layout layout(workspace);
  layout.array(job.tickets, rows);
  job.tile_stats = layout.statistics(rows, warp_tiles_of(p.vocab), needs_best(p.sampling, false));
  return layout.bytes();
}

}  // namespace

int64_t workspace_bytes(const KeptTokensParams& p) {
  KeptJob job = {};
  job.p = p;
  return lay_out(job, nullptr);
}

int kept_tokens(const KeptTokensParams& p, void* workspace, void* stream) {
  const int64_t rows = p.batch * p.rows_each;
  if (rows == 0) return cudaSuccess;
  int processors = 0;
  const cudaError_t status = multiprocessors(&processors);
  if (status != cudaSuccess) return status;
  KeptJob job = {};
  job.p = p;
  lay_out(job, static_cast<char*>(workspace));
  job.launch_id = next_launch_id();
  job.splits = splits_of(processors, rows, warp_tiles_of(p.vocab));
  return launch_blocks(kept_tokens_kernel, job, rows * job.splits, shared_bytes<KeptShared>(true),
                       stream);
}

}  // namespace specdec::cuda
