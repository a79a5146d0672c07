#pragma once
// The actions of a group. Each is written once, and the kernel calls it at one place: what is
// inlined twice costs registers.
#include "cuda/chain/decide.cuh"
#include "cuda/row/filter.cuh"

namespace specdec::cuda {

constexpr size_t kBinBytes = sizeof(Shared::bins);
constexpr int64_t kStatsInShared = kBinBytes / sizeof(RowStats);

class ChainWalk {
 public:
  __device__ ChainWalk(BlockGroup& group, const ChainJob& job, int64_t context)
      : group_(group), job_(job), t_(group.task<ChainTask>()), context_(context) {}

  // The drafts before the first that does not stand, a thread a draft.
  __device__ void touch(const Judge& judge) {
    int64_t first = t_.drafts;
#pragma unroll 1
    for (int emit = 0; emit < 2; ++emit) {
      for (int64_t i = thread_id(); i < first; i += kThreads) {
        if (!judge.touch(i, emit != 0)) first = i;
      }
      if (emit == 0) first = static_cast<int64_t>(~group_.max(~static_cast<uint64_t>(first)));
    }
    if (thread_id() == 0) t_.touched = first;
  }

  // Fills the slots of the row at hand.
  __device__ void fill(int part, int parts) const {
    const GumbelNoise noise{t_.seed, t_.position + t_.i, kSharedStream};
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      if (which == 0 ? t_.gather : !measures_draft()) continue;
      const Want want =
          which == 1 ? Want::kMass : first_want(target_want(), t_.filtered, t_.greedy);
      fill_tile_stats(group_, which == 0 ? t_.row : t_.draft.row,
                      which == 0 ? t_.tile_stats : t_.draft_tile_stats, want,
                      inverse_temperature(which == 0 ? t_.params.temperature : t_.q_temperature),
                      noise, part, parts);
    }
  }

  // The laws of all rows that were filled beforehand, a warp a row. Of a draft's row that could not
  // be filled comes out what nobody asks for.
  __device__ void measure_ahead() {
    const ChainParams& p = job_.p;
    if (!t_.ahead) return;
    const int64_t targets = t_.drafts + (t_.cut ? 0 : 1);
    const int64_t drafts = p.reads_draft() && p.draft.form == DraftForm::kRows ? t_.drafts : 0;
    for (int64_t i = warp_id(); i < targets + drafts; i += kWarps) {
      const bool of_draft = i >= targets;
      const int64_t at = of_draft ? job_.row_tile_stats() + i - targets : i;
      const TileStats tile_stats = job_.tile_stats_array[context_ * job_.context_tile_stats() + at];
      const int64_t vocab = of_draft ? p.draft.vocab : p.vocab;
      const RowStats stats = warp_row_stats(tile_stats, (vocab + kWarpTile - 1) / kWarpTile,
                                            of_draft ? t_.q_temperature : t_.params.temperature);
      if (lane_id() == 0) all_stats()[at] = stats;
    }
  }

  // The laws from the filled slots.
  __device__ void measure() {
    const bool sparse = t_.has_draft && t_.draft.form == DraftForm::kSparse && !t_.draft.fault;
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      if (which == 0 ? t_.gather : !measures_draft()) continue;
      if (t_.prefilled && t_.ahead) {
        if (thread_id() == 0) {
          set_stats(which, all_stats()[t_.i + (which == 0 ? 0 : job_.row_tile_stats())], -1);
        }
        continue;
      }
      int64_t token;
      const RowStats stats =
          read_row_stats(group_, which == 0 ? t_.row : t_.draft.row,
                         which == 0 ? t_.tile_stats : t_.draft_tile_stats,
                         which == 0 ? t_.params : SequenceParams{t_.q_temperature, 0, 1, 0},
                         which == 0 && t_.filtered, which == 0 ? target_want() : Want::kMass,
                         {t_.seed, t_.position + t_.i, kSharedStream}, token);
      if (thread_id() == 0) set_stats(which, stats, token);
    }
    if (sparse) look_up_sparse(group_, t_.draft);
  }

  // Sums of max(cP - lQ, 0) and max(lQ - cP, 0) over the row; the first stays in a slot, to draw
  // from. Or, for `entropy`, of P log P.
  __device__ void difference(bool entropy) {
    group_.sync();  // nobody reads these slots any more
    if (!entropy && t_.state == State::kBlockBack && t_.draft.few() && !t_.direct) {
      few_differences(group_, t_.draft, t_.row, t_.stats, t_.c, t_.more, t_.less);
      if (thread_id() == 0) t_.valid = true;
      return;
    }
    const TileStats more = extra_tile_stats(0), less = extra_tile_stats(1);
    const int64_t warp_tiles = t_.row.warp_tiles(), step = group_.warp_tile_step(1);
    // Both rows of the next warp_tile are on their way while this one is weighed.
    Packed next, next_draft = {};
    int64_t warp_tile = group_.first_warp_tile(0);
    if (warp_tile < warp_tiles) load_both(warp_tile, entropy, next, next_draft);
    for (; warp_tile < warp_tiles; warp_tile += step) {
      float values[kPerLane];
      unpack(t_.row, next, values);
      const Packed draft = next_draft;
      if (warp_tile + step < warp_tiles) load_both(warp_tile + step, entropy, next, next_draft);
      if (t_.direct) fill_direct(warp_tile, values);
      bool valid = true;
      if (entropy) {
        const WeightParams weight_params{t_.stats.max, rate_of(t_.stats.inv_t), t_.stats.threshold};
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          const float w = weight_params.weight(values[j]);
          values[j] = w > 0 ? w * (t_.stats.max - values[j]) : 0.0f;
        }
      } else {
        valid = subtract(warp_tile, draft, values);
      }
      valid = __all_sync(kAllLanes, valid);
      if (job_.p.rule == Rule::kBlock) store_positive(less, warp_tile, values, -1.0f, true);
      store_positive(more, warp_tile, values, 1.0f, valid);
    }
    rest_of_draft();
    group_.sync();
    add_up(entropy);
  }

  __device__ void draw() {
    const TileStats tile_stats = t_.residual ? extra_tile_stats(0) : t_.tile_stats;
    const int64_t warp_tiles = t_.row.warp_tiles();
    const bool linear = t_.residual || t_.stats.direct;
    const float max = linear ? max_of(group_, tile_stats.maxima, warp_tiles) : t_.stats.max;
    const WarpTileMasses masses(group_, tile_stats, warp_tiles, max, t_.stats.inv_t, linear);
    int64_t rest;
    const int64_t warp_tile = masses.choose(group_, last_uniform(), rest);
    float values[kPerLane];
    Packed row, draft = {};
    load_both(warp_tile, !t_.residual, row, draft);
    unpack(t_.row, row, values);
    if (t_.residual) {
      subtract(warp_tile, draft, values);
    } else if (!linear) {
      weigh(values, {tile_stats.maxima[warp_tile], rate_of(t_.stats.inv_t), t_.stats.threshold});
    }
    if (linear) {
      const float inverse = inverse_scale(tile_stats.maxima[warp_tile]);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = values[j] > 0 ? values[j] * inverse : 0.0f;
    }
    const int64_t token = warp_tile * kWarpTile + warp_tile_pick(values, t_.row.wide(), rest);
    if (thread_id() == 0) t_.token = token;
  }

 private:
  // What of the target's row is wanted in the end.
  __device__ Want target_want() const {
    return t_.direct ? Want::kLinear : job_.p.rule == Rule::kMatch ? Want::kGumbel : Want::kMass;
  }

  __device__ bool measures_draft() const { return t_.has_draft && t_.draft.unmeasured(); }

  __device__ double last_uniform() const { return residual_uniform(job_.p, t_, t_.i); }

  __device__ TileStats extra_tile_stats(int i) const {
    return job_
        .tile_stats_array[context_ * job_.context_tile_stats() + 2 * job_.row_tile_stats() + i];
  }

  __device__ float lenience() const {
    return job_.p.rule == Rule::kLenient ? job_.p.lenience : 1.0f;
  }

  // Of rows and their drafts, in memory that a selection would take.
  __device__ RowStats* all_stats() const {
    return reinterpret_cast<RowStats*>(group_.shared->bins);
  }

  __device__ void set_stats(int which, const RowStats& stats, int64_t token) {
    if (which == 0) {
      t_.stats = stats;
      t_.token = token;
      return;
    }
    t_.draft.checked = stats.valid;
    t_.draft.set(stats);
  }

  // A warp_tile of the target, and of the draft unless the target's is all that is asked for.
  __device__ void load_both(int64_t warp_tile, bool target_alone, Packed& target,
                            Packed& draft) const {
    load_warp_tile(t_.row, warp_tile, target);
    if (!target_alone) load_draft(t_.draft, t_.row.vocab, t_.row.wide(), warp_tile, draft);
  }

  // cP - lQ of a warp_tile; values hold the row, `draft` what was loaded of the other.
  __device__ bool subtract(int64_t warp_tile, const Packed& draft,
                           float (&values)[kPerLane]) const {
    if (t_.direct) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = static_cast<float>(t_.c * values[j]);
    } else {
      weigh(values, {t_.stats.max, rate_of(t_.stats.inv_t), t_.stats.threshold});
      const auto scale = static_cast<float>(exp(-t_.stats.log_sum) * t_.c);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] *= scale;
    }
    return subtract_draft(t_.draft, lenience(), t_.row.vocab, t_.row.wide(), warp_tile, draft,
                          values);
  }

  // A row that was only touched so far is measured on the way.
  __device__ void fill_direct(int64_t warp_tile, const float (&values)[kPerLane]) const {
    float top = warp_tile_max(values), w[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) w[j] = values[j];
    const int64_t units = linear_units(w, top);
    if (lane_id() != 0) return;
    t_.tile_stats.maxima[warp_tile] = top;
    t_.tile_stats.units[warp_tile] = units;
  }

  __device__ void rest_of_draft() const {
    const DraftDistribution& d = t_.draft;
    const int64_t size = t_.action == Action::kEntropy ? 0 : rest_size(d, t_.row.vocab);
    if (size == 0) return;
    const TileStats tile_stats = extra_tile_stats(2);
    const RowView rest = d.row.part(d.row.vocab - size, size);
    const int64_t step = group_.warp_tile_step(1);
    for (int64_t warp_tile = group_.first_warp_tile(0); warp_tile < rest.warp_tiles();
         warp_tile += step) {
      float values[kPerLane];
      read_warp_tile(rest, warp_tile, values);
      const float top = d.weigh_all(values);
      store_positive(tile_stats, warp_tile, values, 1.0f, __all_sync(kAllLanes, top < INFINITY));
    }
  }

  __device__ void add_up(bool entropy) {
    const int64_t warp_tiles = t_.row.warp_tiles();
    const int64_t rest =
        entropy ? 0 : (rest_size(t_.draft, t_.row.vocab) + kWarpTile - 1) / kWarpTile;
    double more = 0, less = 0, beyond = 0, whole = 0;
#pragma unroll 1
    for (int which = 0; which < 4; ++which) {
      if ((which == 1 && job_.p.rule != Rule::kBlock) || (which == 2 && rest == 0) ||
          (which == 3 && !t_.direct)) {
        continue;
      }
      const TileStats tile_stats = which == 3 ? t_.tile_stats : extra_tile_stats(which);
      const double sum = stored_sum(group_, tile_stats, which == 2 ? rest : warp_tiles);
      if (which == 0) more = sum;
      if (which == 1) less = sum;
      if (which == 2) beyond = sum;
      if (which == 3) whole = sum;
    }
    if (!entropy && t_.draft.form == DraftForm::kSparse) beyond = sparse_beyond();
    if (thread_id() != 0) return;
    if (entropy) {
      t_.entropy = t_.stats.log_sum + t_.stats.inv_t * more * exp(-t_.stats.log_sum);
      return;
    }
    if (t_.direct) {
      t_.stats = {};
      t_.stats.direct = true;
      t_.stats.valid = whole > 0;
    }
    if (t_.draft.form == DraftForm::kOneHot && t_.draft.token >= t_.row.vocab) beyond = 1;
    // With a map the rest of the row is looked through, and all its tokens were counted already.
    t_.valid = is_finite(more) && is_finite(beyond);
    t_.more = more;
    t_.less = less + (t_.draft.columns != nullptr && !t_.draft.few() ? 0.0 : beyond);
  }

  __device__ double sparse_beyond() {
    double mass = 0;
    for (int64_t k = thread_id(); k < t_.draft.row.vocab; k += kThreads) {
      if (t_.draft.id(k) >= t_.row.vocab) mass += static_cast<double>(at(t_.draft.row, k));
    }
    return group_.sum(mass);
  }

  BlockGroup& group_;
  const ChainJob& job_;
  ChainTask& t_;
  const int64_t context_;
};

}  // namespace specdec::cuda
