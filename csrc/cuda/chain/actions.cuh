#pragma once
// The actions that test entries and measure rows. The kernel calls each at one place, because code
// that is inlined twice costs registers.
#include "cuda/chain/block.cuh"
#include "cuda/row/fill.cuh"
#include "cuda/row/filter.cuh"

namespace specdec::cuda {

// What a warp finds out about a row.
struct MeasuredRow {
  RowStats stats;
  float entry;    // of the drafted token, 0 if it has none
  int64_t token;  // the target's choice, or -1
};

constexpr size_t kBytesForRows = sizeof(Shared::bins);
constexpr int64_t kMostMeasuredRows = kBytesForRows / sizeof(MeasuredRow);

template <Variant kVariant>
class ChainActions : ChainView<kVariant> {
  SPECDEC_CHAIN_VIEW(kVariant);

 public:
  __device__ ChainActions(BlockGroup& group, const ChainJob& job)
      : View(job, group.task<ChainTask>()), group_(group) {}

  // Finds the first rejected draft, one thread for each draft, and emits those before it.
  __device__ void check_entries(const ChainVerifier<kVariant>& verifier) {
    int64_t first = t_.num_drafts;
#pragma unroll 1
    for (int emit = 0; emit < (t_.filling ? 1 : 2); ++emit) {
      for (int64_t i = thread_id(); i < first; i += kThreads) {
        if (!verifier.accepts_by_entry(i, emit != 0)) first = i;
      }
      if (emit == 0) first = static_cast<int64_t>(group_.min(static_cast<uint64_t>(first)));
    }
    if (thread_id() == 0) t_.accepted_ahead = first;
  }

  // Computes the tile statistics of the current row and of its draft.
  __device__ void fill() const {
    if (thread_id() == 0) prepare_fills();
    __syncthreads();
#pragma unroll 1
    for (int which = kTarget; which <= kDraft; ++which) {
      if (!measures(which)) continue;
      fill_tile_stats<Reads>(group_, t_.row_fills[which], kGeneral);
    }
  }

  // kMeasureAll and kMeasure: computes row statistics from tile statistics.
  __device__ void measure() {
    const bool all = action_is(Action::kMeasureAll);
    const bool known = !all && t_.prefilled && t_.all_measured;
    if (!known && (!kGeneral || all)) {
      measure_by_warps(all);
      __syncthreads();
    }
    if (all) return;
#pragma unroll 1
    for (int which = kTarget; which <= kDraft; ++which) {
      const bool target = which == kTarget;
      if (!measures(which)) continue;
      if (!kGeneral || known) {
        const int64_t at = known ? t_.i + (target ? 0 : job_.row_tile_stats()) : which;
        if (thread_id() == 0) set_stats(which, measured_rows()[at], true);
        continue;
      }
      if constexpr (kGeneral) {
        MeasuredRow measured = {};
        measured.stats = read_row_stats(
            group_, target ? t_.row : t_.draft.row, target ? t_.tile_stats : t_.draft_tile_stats,
            target ? t_.params : SequenceParams{t_.draft_temperature, 0, 1, 0},
            target && t_.filtered, target ? target_want() : Want::kMass,
            {t_.seed, t_.position + t_.i, kSharedStream}, measured.token);
        if (thread_id() == 0) set_stats(which, measured, false);
      }
    }
    if constexpr (kGeneral) {
      if (t_.has_draft && sparse() && !t_.draft.invalid_at_token) {
        look_up_sparse(group_, t_.draft);
      }
    }
  }

 private:
  // The rows that are measured.
  enum Which { kTarget, kDraft };

  // The use of the target row's tile statistics once filters are applied.
  __device__ Want target_want() const {
    return direct() ? Want::kLinear : rule_is(Rule::kMatch) ? Want::kGumbel : Want::kMass;
  }

  __device__ bool measures(int which) const {
    return which == kTarget ? !t_.reads_one_entry : t_.has_draft && t_.draft.unmeasured();
  }

  // For one thread.
  __device__ void prepare_fills() const {
    const int split = t_.filling ? t_.own_split : 0, splits = t_.filling ? job_.plan.splits : 1;
    const auto rate = [](float temperature) { return rate_of(inverse_temperature(temperature)); };
    t_.row_fills[kTarget] = {t_.row,
                             t_.tile_stats,
                             rate(t_.params.temperature),
                             first_want(target_want(), filtered(), t_.greedy),
                             {t_.seed, t_.position + t_.i, kSharedStream},
                             split,
                             splits};
    t_.row_fills[kDraft] = {
        t_.draft.row, t_.draft_tile_stats, rate(t_.draft_temperature), Want::kMass, {}, split,
        splits};
  }

  // Measures all rows, or the current one and its draft, a warp each. No test of a draft then waits
  // for its entries. The result for a row that was not filled has no meaning and is not used.
  __device__ void measure_by_warps(bool all) const {
    const int64_t targets = all ? t_.num_drafts + (t_.no_bonus ? 0 : 1) : 1;
    // Rows of probabilities are not measured.
    const bool draft_rows = kVariant != Variant::kProbs && reads_draft() && !t_.greedy &&
                            p_.draft.form == DraftForm::kRows;
    const int64_t drafts = !draft_rows ? 0 : all ? t_.num_drafts : 1;
    for (int64_t i = warp_id(); i < targets + drafts; i += kWarps) {
      const bool of_draft = i >= targets;
      if (!all && !measures(of_draft ? kDraft : kTarget)) continue;
      const int64_t row = (all ? 0 : t_.i) + (of_draft ? i - targets : i);
      const int64_t slot = all ? row + (of_draft ? job_.row_tile_stats() : 0) : of_draft;
      const TileStats tile_stats =
          all        ? job_.tile_stats_array[t_.context * job_.context_tile_stats() + slot]
          : of_draft ? t_.draft_tile_stats
                     : t_.tile_stats;
      MeasuredRow measured;
      measured.entry = entry_of_draft(row, of_draft);
      const int64_t vocab = of_draft ? p_.draft.vocab : p_.vocab;
      measured.stats =
          warp_row_stats(tile_stats, (vocab + kWarpTile - 1) / kWarpTile,
                         of_draft ? t_.draft_temperature : t_.params.temperature,
                         direct() && !of_draft, p_.kind == Kind::kProbs, measured.token);
      if (lane_id() == 0) measured_rows()[slot] = measured;
    }
  }

  // They lie where a top-k or top-p selection has its histogram, which is free because rows are
  // measured by warps only without filters.
  __device__ MeasuredRow* measured_rows() const {
    return reinterpret_cast<MeasuredRow*>(group_.shared->bins);
  }

  // An entry, read in place: the wait for it is the one for the row's statistics.
  __device__ float known_at(RowView row, int64_t index) const {
    row.read = Reads::of(row.read);
    return at(row, index);
  }

  // The entry of drafted token i in its target row or in its draft row of logits, 0 if there is
  // none.
  __device__ float entry_of_draft(int64_t i, bool of_draft) const {
    const int64_t x = i < t_.num_drafts ? drafted_token(p_, t_, i) : -1;
    if (!of_draft) return x >= 0 && x < p_.vocab ? known_at(target_row(p_, t_, i), x) : 0;
    const DraftParams source = draft_source();
    const int64_t row = draft_row(p_, t_, i);
    if (x < 0 || !has_row(source, row)) return 0;
    const int64_t column = column_of(source.columns, source.vocab, x);
    return column < 0 ? 0 : known_at(row_of(source, t_.b, row, Read::kLogits), column);
  }

  // with_entry: the entry of the drafted token was read with the statistics.
  __device__ void set_stats(int which, const MeasuredRow& measured, bool with_entry) {
    if (which == kTarget) {
      t_.stats = measured.stats;
      t_.token = measured.token;
      t_.has_entry = with_entry;
      if (with_entry) t_.entry = measured.entry;
      return;
    }
    t_.draft.row_checked = measured.stats.valid;
    t_.draft.set(measured.stats, with_entry ? &measured.entry : nullptr);
  }

  BlockGroup& group_;
};

}  // namespace specdec::cuda
