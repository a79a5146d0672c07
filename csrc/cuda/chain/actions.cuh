#pragma once
// The actions of a group. The kernel calls each at one place, because code that is inlined twice
// costs registers.
#include "cuda/chain/block.cuh"
#include "cuda/row/fill.cuh"
#include "cuda/row/filter.cuh"

namespace specdec::cuda {

constexpr size_t kBinBytes = sizeof(Shared::bins);
constexpr int64_t kMaxRowStatsInBins = kBinBytes / sizeof(RowStats);
static_assert(kMaxRowStatsInBins <= kCandidates, "the entries of as many rows fit in candidates");

class ChainActions {
 public:
  __device__ ChainActions(BlockGroup& group, const ChainJob& job, int64_t context)
      : group_(group), job_(job), t_(group.task<ChainTask>()), context_(context) {}

  // Finds the first rejected draft, one thread for each draft, and emits those before it.
  __device__ void check_entries(const ChainVerifier& verifier) {
    int64_t first = t_.num_drafts;
#pragma unroll 1
    for (int emit = 0; emit < 2; ++emit) {
      for (int64_t i = thread_id(); i < first; i += kThreads) {
        if (!verifier.accepts_by_entry(i, emit != 0)) first = i;
      }
      if (emit == 0) first = static_cast<int64_t>(group_.min(static_cast<uint64_t>(first)));
    }
    if (thread_id() == 0) t_.accepted_ahead = first;
  }

  // Computes the tile statistics of the current row and of its draft.
  __device__ void fill(int split, int splits) const {
    const GumbelNoise noise{t_.seed, t_.position + t_.i, kSharedStream};
#pragma unroll 1
    for (int which = kTarget; which <= kDraft; ++which) {
      const bool target = which == kTarget;
      if (!measures(which)) continue;
      const Want want = target ? first_want(target_want(), t_.filtered, t_.greedy) : Want::kMass;
      fill_tile_stats(group_, target ? t_.row : t_.draft.row,
                      target ? t_.tile_stats : t_.draft_tile_stats, want,
                      inverse_temperature(target ? t_.params.temperature : t_.draft_temperature),
                      noise, split, splits);
    }
  }

  // Computes the statistics of all rows from their tile statistics, one warp for each row, and
  // reads their entries of the drafted tokens. The result for a draft row that was not read has no
  // meaning and is not used.
  __device__ void measure_all() {
    const ChainParams& p = job_.p;
    if (!t_.all_measured) return;
    const int64_t targets = t_.num_drafts + (t_.no_bonus ? 0 : 1);
    const int64_t drafts = p.reads_draft() && p.draft.form == DraftForm::kRows ? t_.num_drafts : 0;
    for (int64_t i = warp_id(); i < targets + drafts; i += kWarps) {
      const bool of_draft = i >= targets;
      // Read for all rows here: no test of a draft waits for its entries.
      const float entry = of_draft ? draft_entry(i - targets) : target_entry(i);
      const int64_t at = of_draft ? job_.row_tile_stats() + i - targets : i;
      const TileStats tile_stats = job_.tile_stats_array[context_ * job_.context_tile_stats() + at];
      const int64_t vocab = of_draft ? p.draft.vocab : p.vocab;
      const RowStats stats =
          warp_row_stats(tile_stats, (vocab + kWarpTile - 1) / kWarpTile,
                         of_draft ? t_.draft_temperature : t_.params.temperature);
      if (lane_id() != 0) continue;
      all_stats()[at] = stats;
      all_entries()[at] = entry;
    }
  }

  // Computes the statistics of the current row and of its draft from their tile statistics.
  __device__ void measure() {
    const bool sparse =
        t_.has_draft && t_.draft.form == DraftForm::kSparse && !t_.draft.invalid_at_token;
#pragma unroll 1
    for (int which = kTarget; which <= kDraft; ++which) {
      const bool target = which == kTarget;
      if (!measures(which)) continue;
      int64_t token = -1;
      RowStats stats;
      const float* entry = nullptr;
      if (t_.prefilled && t_.all_measured) {
        const int64_t at = t_.i + (target ? 0 : job_.row_tile_stats());
        stats = all_stats()[at];
        entry = &all_entries()[at];
      } else {
        stats = read_row_stats(group_, target ? t_.row : t_.draft.row,
                               target ? t_.tile_stats : t_.draft_tile_stats,
                               target ? t_.params : SequenceParams{t_.draft_temperature, 0, 1, 0},
                               target && t_.filtered, target ? target_want() : Want::kMass,
                               {t_.seed, t_.position + t_.i, kSharedStream}, token);
      }
      if (thread_id() == 0) set_stats(which, stats, token, entry);
    }
    if (sparse) look_up_sparse(group_, t_.draft);
  }

  // kResidual: sums max(cP - lQ, 0), whose tile sums are kept to draw from, and max(lQ - cP, 0)
  // over the row. kEntropy: computes the entropy of P.
  __device__ void sum_over_row() {
    const bool entropy = t_.action == Action::kEntropy;
    group_.sync();  // no block reads these tile statistics any more
    if (!entropy && t_.state == State::kBlockFromEnd && t_.sums_residual_of_few()) {
      sum_residual_of_few(group_, t_.draft, t_.row, t_.stats, t_.c, t_.positive, t_.negative);
      if (thread_id() == 0) t_.valid = true;
      return;
    }
    const ScaledTarget target(t_.stats, t_.direct || entropy, t_.c);
    const auto step = static_cast<int>(group_.warp_tile_step(1));
    auto warp_tile = static_cast<int>(group_.first_warp_tile(0));
    const bool fast =
        !entropy && job_.p.rule != Rule::kBlock && ResidualRows::serves(t_.row, target, t_.draft);
    for (;; warp_tile += step) {
      if (fast) warp_tile = sum_whole_tiles(target, warp_tile, step);
      if (warp_tile >= t_.row.warp_tiles()) break;
      sum_tile(target, warp_tile, entropy);
    }
    if (!entropy) sum_beyond();
    group_.sync();
    add_up(entropy);
  }

  __device__ void draw() {
    const TileStats tile_stats = t_.residual ? extra_tile_stats(kPositive) : t_.tile_stats;
    const int64_t warp_tiles = t_.row.warp_tiles();
    const bool linear = t_.residual || t_.stats.direct;
    const float max = linear ? max_of(group_, tile_stats.maxima, warp_tiles) : t_.stats.max;
    const WarpTileMasses masses(group_, tile_stats, warp_tiles, max, t_.stats.inv_t, linear);
    int64_t rest;
    const int64_t warp_tile = masses.choose(group_, residual_uniform(job_.p, t_, t_.i), rest);
    float values[kPerLane];
    Packed row, draft = {};
    load_both(warp_tile, !t_.residual, row, draft);
    unpack(t_.row, row, values);
    if (t_.residual) {
      subtract(ScaledTarget(t_.stats, t_.direct, t_.c), warp_tile, draft, values);
    } else if (!linear) {
      weigh_tile(values, tile_stats.maxima[warp_tile], rate_of(t_.stats.inv_t), t_.stats.threshold);
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
  // The rows that are measured.
  enum Which { kTarget, kDraft };
  // The sums over a row: the first three have tile statistics of their own.
  enum Sum { kPositive, kNegative, kBeyond, kDirect };

  // The use of the target row's tile statistics once filters are applied.
  __device__ Want target_want() const {
    return t_.direct ? Want::kLinear : job_.p.rule == Rule::kMatch ? Want::kGumbel : Want::kMass;
  }

  __device__ bool measures(int which) const {
    return which == kTarget ? !t_.reads_one_entry : t_.has_draft && t_.draft.unmeasured();
  }

  __device__ TileStats extra_tile_stats(int sum) const {
    return job_
        .tile_stats_array[context_ * job_.context_tile_stats() + 2 * job_.row_tile_stats() + sum];
  }

  // The statistics of all target and draft rows, and their entries of the drafted tokens. They lie
  // where a top-k or top-p selection has its histogram and its candidates, which is free because
  // `all_measured` excludes filters.
  __device__ RowStats* all_stats() const {
    return reinterpret_cast<RowStats*>(group_.shared->bins);
  }

  __device__ float* all_entries() const {
    return reinterpret_cast<float*>(group_.shared->candidates);
  }

  // The entries of drafted token i in its target row and in its draft row of logits, 0 if it has
  // none there.
  __device__ float target_entry(int64_t i) const {
    const int64_t x = i < t_.num_drafts ? drafted_token(job_.p, t_, i) : -1;
    return x >= 0 && x < job_.p.vocab ? at(target_row(job_.p, t_, i), x) : 0;
  }
  __device__ float draft_entry(int64_t i) const {
    const DraftParams& source = job_.p.draft;
    const int64_t row = draft_row(job_.p, t_, i);
    const int64_t column = column_of(source.columns, source.vocab, drafted_token(job_.p, t_, i));
    if (!has_row(source, row) || column < 0) return 0;
    return at(row_of(source, t_.b, row, Read::kLogits), column);
  }

  // `entry`: of the drafted token, if it was read with the statistics.
  __device__ void set_stats(int which, const RowStats& stats, int64_t token, const float* entry) {
    if (which == kTarget) {
      t_.stats = stats;
      t_.token = token;
      t_.has_entry = entry != nullptr;
      if (t_.has_entry) t_.entry = *entry;
      return;
    }
    t_.draft.row_checked = stats.valid;
    t_.draft.set(stats, entry);
  }

  // Loads a warp tile of the target and, unless `target_alone`, of the draft.
  __device__ void load_both(int64_t warp_tile, bool target_alone, Packed& target,
                            Packed& draft) const {
    load_warp_tile(t_.row, warp_tile, target);
    if (!target_alone) load_draft(t_.draft, t_.row.vocab, t_.row.wide(), warp_tile, draft);
  }

  __device__ int sum_whole_tiles(const ScaledTarget& target, int warp_tile, int step) const {
    const ResidualRows rows(t_.row, target, t_.draft, job_.p.lenience);
    const TileStats positive = extra_tile_stats(kPositive), direct = t_.tile_stats;
    const auto sum = [&](auto type, auto probs) {
      return sum_residual<decltype(type)::value, decltype(probs)::value>(rows, warp_tile, step,
                                                                         positive, direct);
    };
    if (t_.direct) return sum(DTypeOf<DType::kFloat32>(), std::true_type());
    switch (t_.row.dtype) {
      case DType::kFloat32:
        return sum(DTypeOf<DType::kFloat32>(), std::false_type());
      case DType::kBFloat16:
        return sum(DTypeOf<DType::kBFloat16>(), std::false_type());
      default:
        return sum(DTypeOf<DType::kFloat16>(), std::false_type());
    }
  }

  // Sums one warp tile of any rows.
  __device__ void sum_tile(const ScaledTarget& target, int warp_tile, bool entropy) const {
    float values[kPerLane];
    Packed row, draft = {};
    load_both(warp_tile, entropy, row, draft);
    unpack(t_.row, row, values);
    if (t_.direct) fill_direct(warp_tile, values);
    bool valid = true;
    if (entropy) {
      weigh_entropy(values, t_.stats);
    } else {
      valid = subtract(target, warp_tile, draft, values);
    }
    valid = __all_sync(kAllLanes, valid);
    const bool wide = t_.row.wide();
    if (job_.p.rule == Rule::kBlock) {
      store_positive(extra_tile_stats(kNegative), warp_tile, values, wide, -1.0f, true);
    }
    store_positive(extra_tile_stats(kPositive), warp_tile, values, wide, 1.0f, valid);
  }

  // Turns a warp tile of the target into cP - lQ, with the draft's warp tile that `load_both` read.
  __device__ bool subtract(const ScaledTarget& target, int64_t warp_tile, const Packed& draft,
                           float (&values)[kPerLane]) const {
    target.normalise_all(values);
    return subtract_draft(t_.draft, job_.p.lenience, t_.row.vocab, t_.row.wide(), warp_tile, draft,
                          values);
  }

  // Computes the tile statistics of a direct row, of which only one entry was read before.
  __device__ void fill_direct(int64_t warp_tile, const float (&values)[kPerLane]) const {
    float top = warp_tile_max(values);
    const int64_t units = linear_units(values, t_.row.wide(), top);
    if (lane_id() != 0) return;
    t_.tile_stats.maxima[warp_tile] = top;
    t_.tile_stats.units[warp_tile] = units;
  }

  // Sums Q over the last `columns_beyond` columns of the draft row.
  __device__ void sum_beyond() const {
    const DraftDistribution& d = t_.draft;
    const int64_t size = columns_beyond(d, t_.row.vocab);
    if (size == 0) return;
    const TileStats tile_stats = extra_tile_stats(kBeyond);
    const RowView columns = d.row.part(d.row.vocab - size, size);
    const int64_t step = group_.warp_tile_step(1);
    for (int64_t warp_tile = group_.first_warp_tile(0); warp_tile < columns.warp_tiles();
         warp_tile += step) {
      float values[kPerLane];
      read_warp_tile(columns, warp_tile, values);
      const float top = d.normalise_all(values);
      store_positive(tile_stats, warp_tile, values, columns.wide(), 1.0f,
                     __all_sync(kAllLanes, top < INFINITY));
    }
  }

  __device__ void add_up(bool entropy) {
    const int64_t warp_tiles = t_.row.warp_tiles();
    const int64_t warp_tiles_beyond =
        entropy ? 0 : (columns_beyond(t_.draft, t_.row.vocab) + kWarpTile - 1) / kWarpTile;
    double positive = 0, negative = 0, mass_beyond = 0, direct_mass = 0;
#pragma unroll 1
    for (int which = kPositive; which <= kDirect; ++which) {
      if ((which == kNegative && job_.p.rule != Rule::kBlock) ||
          (which == kBeyond && warp_tiles_beyond == 0) || (which == kDirect && !t_.direct)) {
        continue;
      }
      const TileStats tile_stats = which == kDirect ? t_.tile_stats : extra_tile_stats(which);
      const double sum =
          stored_sum(group_, tile_stats, which == kBeyond ? warp_tiles_beyond : warp_tiles);
      if (which == kPositive) positive = sum;
      if (which == kNegative) negative = sum;
      if (which == kBeyond) mass_beyond = sum;
      if (which == kDirect) direct_mass = sum;
    }
    if (!entropy && t_.draft.form == DraftForm::kSparse) mass_beyond = sparse_mass_beyond();
    if (thread_id() != 0) return;
    if (entropy) {
      t_.entropy = t_.stats.entropy(positive);
      return;
    }
    if (t_.direct) {
      t_.stats = {};
      t_.stats.direct = true;
      t_.stats.valid = direct_mass > 0;
    }
    if (t_.draft.form == DraftForm::kOneHot && t_.draft.token >= t_.row.vocab) mass_beyond = 1;
    t_.valid = is_finite(positive) && is_finite(mass_beyond);
    t_.positive = positive;
    // With a map from tokens to columns `mass_beyond` is the sum of the whole row, which was read
    // only to validate it; `negative` has counted Q token by token already.
    const bool mapped = t_.draft.columns != nullptr && !t_.draft.lists_tokens();
    t_.negative = negative + (mapped ? 0.0 : mass_beyond);
  }

  __device__ double sparse_mass_beyond() {
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
