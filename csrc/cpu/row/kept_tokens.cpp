#include "specdec/kept_tokens.h"

#include <algorithm>
#include <cmath>

#include "cpu/each_sequence.h"
#include "cpu/row/filter.h"
#include "specdec/row_stats.h"

namespace specdec::cpu {
namespace {

struct KeptScratch : Scratch {
  std::vector<uint64_t> ranks;  // see rank_key
};

// How many entries of a measured row are at or above a value.
int64_t count_from(const RowView& row, float low, const Parallel& parallel, Scratch& scratch) {
  scratch.sums.resize(row.tiles());
  parallel(row.tiles(), [&](int64_t begin, int64_t end) {
    float buffer[kTile];
    for (int64_t t = begin; t < end; ++t) {
      // Exact as a float: a tile has few entries.
      scratch.sums[t] =
          scratch.maxima[t] >= low
              ? static_cast<float>(tile_kernels().count(row.tile(t, buffer), row.tile_size(t), low))
              : 0.0f;
    }
  });
  return static_cast<int64_t>(total(scratch.sums));
}

void keep_first(std::vector<uint64_t>& ranks, int64_t most) {
  if (static_cast<int64_t>(ranks.size()) <= most) return;
  std::nth_element(ranks.begin(), ranks.begin() + most, ranks.end());
  ranks.resize(most);
}

// Ranks the first `most` of the entries at or above a value.
void rank_from(const RowView& row, float low, int64_t most, KeptScratch& scratch) {
  std::vector<uint64_t>& ranks = scratch.ranks;
  ranks.clear();
  float buffer[kTile], values[kTile];
  int32_t ids[kTile];
  for (int64_t t = 0; t < row.tiles(); ++t) {
    if (!(scratch.maxima[t] >= low)) continue;
    const int64_t n =
        tile_kernels().gather(row.tile(t, buffer), row.tile_size(t), t * kTile, low, values, ids);
    for (int64_t i = 0; i < n; ++i) ranks.push_back(rank_key(ordered_key(values[i]), ids[i]));
    // Any number of entries may tie at the bound.
    if (static_cast<int64_t>(ranks.size()) >= 2 * kMostKept) keep_first(ranks, most);
  }
  keep_first(ranks, most);
  std::sort(ranks.begin(), ranks.end());
}

// The smallest logit that may be among the `most` largest.
float bound_of_largest(const RowView& row, int64_t most, const RowStats& stats, float temperature,
                       Scratch& scratch) {
  RowStats largest = stats;
  filter(row, {temperature, most, 1, 0}, 0, largest, scratch);
  return largest.threshold;
}

// One row of output.
struct KeptOut {
  int64_t* ids;
  float* logprobs;
  int32_t& count;
  int32_t& status;

  KeptOut(const KeptTokensParams& p, int64_t n)
      : ids(p.ids + n * p.max_kept),
        logprobs(p.logprobs + n * p.max_kept),
        count(p.counts[n]),
        status(p.status[n]) {
    std::fill(ids, ids + p.max_kept, -1);
    std::fill(logprobs, logprobs + p.max_kept, -INFINITY);
    count = 0;
    status = 0;
  }
};

void write_kept(const KeptTokensParams& p, const RowView& row, const SequenceParams& params,
                const RowStats& stats, const Parallel& parallel, KeptScratch& scratch,
                KeptOut& out) {
  if (stats.one_hot) {
    out.ids[0] = stats.argmax;
    out.logprobs[0] = 0;
    out.count = 1;
    return;
  }
  float low = kept_threshold(stats.max, params.temperature, stats.threshold);
  const int64_t count = count_from(row, low, parallel, scratch);
  if (count > p.max_kept) {
    out.status = kKeptCut;
    low = std::max(low, bound_of_largest(row, p.max_kept, stats, params.temperature, scratch));
  }
  rank_from(row, low, p.max_kept, scratch);
  out.count = static_cast<int32_t>(count);
  for (size_t i = 0; i < scratch.ranks.size(); ++i) {
    out.ids[i] = id_of_rank(scratch.ranks[i]);
    out.logprobs[i] = static_cast<float>(entry_logprob(stats, logit_of_rank(scratch.ranks[i])));
  }
}

}  // namespace

void kept_tokens(const KeptTokensParams& p, const Parallel& parallel) {
  const int64_t rows = p.batch * p.rows_each;
  each_sequence<KeptScratch>(parallel, rows, rows * p.vocab,
                             [&](int64_t n, const Parallel& inner, KeptScratch& scratch) {
                               KeptOut out(p, n);
                               const KeptRow at = open_kept_row(p, n);
                               out.status = at.status;
                               if (!at.exists) return;
                               const RowView row(p.target, at.sequence, at.row, p.vocab, at.read);
                               bool valid = true;
                               if (at.read == Read::kProbs)
                                 valid = measure_direct(row, inner, scratch).valid;
                               RowStats stats;
                               if (valid) stats = measure(row, at.params, inner, scratch, true);
                               if (!stats.valid) {
                                 out.status = kept_fault(p, at);
                                 return;
                               }
                               write_kept(p, row, at.params, stats, inner, scratch, out);
                             });
}

}  // namespace specdec::cpu
