#pragma once
// What a launch of rows leaves of a row for a decision: blocks that share the row compute the
// statistics of its warp tiles, and the last of them makes the summary.
#include "cuda/row/select.cuh"

namespace specdec::cuda {

struct alignas(64) RowSummary {
  RowStats stats;
  float entry;     // of the drafted token, 0 if the row has none
  int32_t listed;  // survivors in the list of the row, if it has one; -1 if they are not listed
  int64_t token;   // the target's choice, by its maximum or by Gumbel noise; else -1
  double asked;  // what a rule asks for: the entropy of P, or the number of entries above `entry`,
                 // for a rule that asks
};
static_assert(sizeof(RowSummary) == 64, "one line of two sectors");

// A row of logits or probabilities, or one split of it. For one thread.
inline __device__ void open_row(const RowView& row, const TileStats& tile_stats,
                                const SequenceParams& params, Want want, bool filtered,
                                const GumbelNoise& noise, int split, int splits, RowTask& t) {
  t.row = row;
  t.tile_stats = tile_stats;
  t.rate = rate_of(inverse_temperature(params.temperature));
  t.want = first_want(want, filtered, params.temperature == 0);
  t.noise = noise;
  t.split = split;
  t.splits = splits;
  t.params = params;
  t.list = nullptr;
  t.want_of_survivors = want;
  t.filtered = filtered;
}

// The survivors among the candidates of a row, whose masses they become.
class Listed {
 public:
  // After `Selection` has listed them.
  __device__ Listed(ThreadBlock& block, Candidates& candidates, const RowStats& stats)
      : block_(block), c_(candidates), stats_(stats), n_(static_cast<int>(candidates.count)) {}

  // Turns values into masses relative to the maximum of the row; returns their sum.
  __device__ int64_t weigh() {
    const float rate = rate_of(stats_.inv_t);
    int64_t mine = 0;
    for (int i = thread_id(); i < n_; i += kThreads) {
      const float value = from_ordered_key(c_.keys[i]);
      c_.masses[i] = value >= stats_.threshold ? units_of(tile_weight(value, stats_.max, rate)) : 0;
      mine += c_.masses[i];
    }
    return block_.sum(mine);
  }

  // The logarithm of the sum of exp((l - max) / T), from the sum that `weigh` returned.
  __device__ double log_sum(int64_t total) const {
    const double above = tile_offset(stats_.max, rate_of(stats_.inv_t)).above;
    return log_of(static_cast<double>(total)) - M_LN2 * (kUnitBits + above);
  }

  // Gumbel-max sampling: the token with the best score, the lowest id among equals.
  __device__ int64_t gumbel_winner(const GumbelNoise& noise) {
    const float rate = rate_of(stats_.inv_t);
    uint32_t best = 0;
    int64_t winner = -1;
    for (int i = thread_id(); i < n_; i += kThreads) {
      const float value = from_ordered_key(c_.keys[i]);
      const float w = tile_weight(value, stats_.max, rate);
      if (!(value >= stats_.threshold) || !(w > 0)) continue;
      const int32_t id = c_.ids[i];
      const auto counter = static_cast<uint32_t>(id) / 4;
      const uint32_t word =
          word_at(philox(noise.seed, counter, noise.position, noise.stream), id % 4);
      const float e = exponential(word, id % 4, noise, counter);
      const auto score = bits_as<uint32_t>(w / e);
      if (score < best || (score == best && winner >= 0 && id > winner)) continue;
      best = score;
      winner = id;
    }
    const uint32_t high = block_.max_key(best);
    const bool mine = winner >= 0 && best == high;
    return static_cast<int64_t>(block_.min(mine ? static_cast<uint64_t>(winner) : ~uint64_t{0}));
  }

  // Writes the survivors; returns their number.
  __device__ int32_t write(Survivor* list) {
    if (thread_id() == 0) c_.found = 0;
    __syncthreads();
    for (int i = thread_id(); i < n_; i += kThreads) {
      const float value = from_ordered_key(c_.keys[i]);
      if (!(value >= stats_.threshold)) continue;
      list[atomicAdd(&c_.found, 1u)] = {value, c_.ids[i]};
    }
    __syncthreads();
    return static_cast<int32_t>(c_.found);
  }

 private:
  ThreadBlock& block_;
  Candidates& c_;
  const RowStats& stats_;
  const int n_;
};

// The token at which the running mass of the candidates, in the order of their ids, passes u times
// `total`. Overwrites their keys. For the whole block.
inline __device__ int64_t draw_listed(Candidates& c, int64_t total, int64_t vocab, double u) {
  const auto n = static_cast<int>(c.count);
  const auto last = static_cast<uint32_t>(vocab - 1);
  __syncthreads();
  for (int i = thread_id(); i < n; i += kThreads)
    c.keys[i] = last - static_cast<uint32_t>(c.ids[i]);
  __syncthreads();
  const double point = u * static_cast<double>(total);
  int64_t target = static_cast<int64_t>(point);
  if (target >= total) target = total - 1;
  return last - largest_reaching(c, c.masses, n, 0, last, target + 1);
}

// Makes the summary of a row whose tile statistics are complete, except `entry` and `asked`. The
// task and the summary lie in shared memory. For the whole block.
inline __device__ void summarise(ThreadBlock& block, const RowTask& t, Candidates& candidates,
                                 RowSummary& out) {
  const int64_t tiles = t.row.warp_tiles();
  {
    const TileRun run(t.tile_stats, tiles);
    RowStats stats = row_stats_of(block, t.tile_stats, run, t.params.temperature);
    // Probabilities that are all 0 are not valid either.
    if (stats.one_hot && t.row.read == Read::kProbs) stats.valid &= stats.max > 0;
    if (thread_id() == 0) out = {stats, 0, -1, -1, 0};
  }
  __syncthreads();
  const RowStats& stats = out.stats;
  if (!stats.valid) return;
  int64_t token = -1;
  int32_t listed = -1;
  if (stats.one_hot) {
    token = argmax(block, t.tile_stats, tiles, stats.max);
    if (thread_id() == 0) out.token = token;
    return;
  }
  if (t.filtered) {
    Selection selection(block, candidates, t, stats);
    const float threshold = selection.threshold();
    __syncthreads();
    if (thread_id() == 0) out.stats.threshold = threshold;
    __syncthreads();
    if (selection.listed()) {
      Listed survivors(block, candidates, stats);
      const int64_t total = survivors.weigh();
      if (t.want_of_survivors == Want::kGumbel) token = survivors.gumbel_winner(t.noise);
      listed = t.list != nullptr ? survivors.write(t.list) : 0;
      if (thread_id() != 0) return;
      candidates.total = total;
      out.stats.log_sum = survivors.log_sum(total);
      out.token = token;
      out.listed = listed;
      return;
    }
    filter_tile_stats(t.row, t.tile_stats, t.want_of_survivors, stats.threshold,
                      rate_of(stats.inv_t), t.noise);
  }
  if (t.want_of_survivors == Want::kGumbel)
    token = gumbel_winner(block, t.tile_stats, tiles, stats);
  const bool direct = t.want_of_survivors == Want::kLinear;
  const TileRun run(t.tile_stats, tiles);
  const WarpTileMasses masses(block, t.tile_stats, tiles, run, stats.max, stats.inv_t, direct);
  if (thread_id() != 0) return;
  out.token = token;
  out.stats.direct = direct;
  out.stats.valid = masses.any();
  out.stats.log_sum = masses.log_sum();
}

// The sum over a row of what `terms` makes of its values, in the tiles that reach `low`. Terms are
// integers, so that no order changes the sum. For the whole block.
template <class Terms>
inline __device__ int64_t sum_of_row(ThreadBlock& block, const RowTask& t, float low,
                                     const Terms& terms) {
  int64_t mine = 0;
  for_warp_tiles(t.tile_stats, t.row.warp_tiles(), low, [&](int warp_tile) {
    const TileValues tile = call_read_warp_tile(t.row, warp_tile);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) mine += terms(tile.values[j]);
  });
  return block.sum(mine);
}

// The entropy of P: log sum exp plus the mean of (max - l) / T. For the whole block.
inline __device__ double entropy(ThreadBlock& block, const RowTask& t, const RowStats& stats) {
  const int bits = 62 - ceil_log2(t.row.vocab);
  const auto unit = static_cast<float>(int64_t{1} << (bits < 48 ? bits : 48));
  const WeightParams weights = {stats.max, rate_of(stats.inv_t), stats.threshold};
  const int64_t sum = sum_of_row(block, t, stats.threshold, [&](float l) {
    const float w = weights.weight(l);
    // At most .54.
    return w > 0 ? static_cast<int64_t>(w * ((stats.max - l) * weights.rate) * unit) : 0;
  });
  return stats.log_sum + M_LN2 * (static_cast<double>(sum) / unit) * exp_of(-stats.log_sum);
}

inline __device__ int64_t count_above(ThreadBlock& block, const RowTask& t, float value) {
  return sum_of_row(block, t, value, [&](float l) { return int64_t{l > value}; });
}

// Draws from a row by its tile statistics. For the whole block.
inline __device__ int64_t draw_from_row(ThreadBlock& block, const RowView& row,
                                        const TileStats& tile_stats, const RowStats& stats,
                                        double u) {
  const int64_t tiles = row.warp_tiles();
  const TileRun run(tile_stats, tiles);
  const WarpTileMasses masses(block, tile_stats, tiles, run, stats.max, stats.inv_t, stats.direct);
  int64_t rest;
  const int64_t warp_tile = masses.choose(block, u, rest);
  TileValues tile = call_read_warp_tile(row, warp_tile);
  const float max = tile_stats.maxima[warp_tile];
  if (stats.direct) {
    scale_down(tile.values, max);
  } else {
    weigh_tile(tile.values, max, rate_of(stats.inv_t), stats.threshold);
  }
  return warp_tile * kWarpTile + warp_tile_pick(tile.values, row.wide(), rest);
}

// Makes the survivors of a row the candidates. For the whole block.
inline __device__ void load_list(const Survivor* list, int32_t listed, Candidates& c) {
  if (thread_id() == 0) c.count = static_cast<uint32_t>(listed);
  for (int i = thread_id(); i < listed; i += kThreads) {
    const Survivor survivor = list[i];
    c.keys[i] = ordered_key(survivor.value);
    c.ids[i] = survivor.id;
  }
  __syncthreads();
}

// Draws from the P that a launch of rows has measured: `row` is that row, `list` its survivors. For
// the whole block.
inline __device__ int64_t draw_measured(ThreadBlock& block, const RowView& row,
                                        const RowSummary& summary, const TileStats& tile_stats,
                                        const Survivor* list, Candidates& candidates, double u) {
  if (summary.listed < 0) return draw_from_row(block, row, tile_stats, summary.stats, u);
  load_list(list, summary.listed, candidates);
  const int64_t total = Listed(block, candidates, summary.stats).weigh();
  return draw_listed(candidates, total, row.vocab, u);
}

// Turns value(l, id) of each candidate, where it is above 0, into its mass in units of `scale`, a
// power of two near the largest; returns their sum. For the whole block.
template <class Value>
inline __device__ int64_t weigh_listed(ThreadBlock& block, Candidates& c, const Value& value,
                                       float& scale) {
  const auto n = static_cast<int>(c.count);
  float top = 0;
  for (int i = thread_id(); i < n; i += kThreads) {
    const float v = fmaxf(value(from_ordered_key(c.keys[i]), c.ids[i]), 0.0f);  // NaN becomes 0
    c.masses[i] = bits_as<uint32_t>(v);
    top = fmaxf(top, v);
  }
  scale = scale_of(from_ordered_key(block.max_key(ordered_key(top))));
  const float inverse = inverse_scale(scale);
  int64_t sum = 0;
  for (int i = thread_id(); i < n; i += kThreads) {
    c.masses[i] = units_of(bits_as<float>(static_cast<uint32_t>(c.masses[i])) * inverse);
    sum += c.masses[i];
  }
  return block.sum(sum);
}

}  // namespace specdec::cuda
