#pragma once
// The actions that measure rows. The kernel calls each at one place, because code
// that is inlined twice costs registers.
#include "cuda/chain/block.cuh"
#include "cuda/row/fill.cuh"
#include "cuda/row/filter.cuh"

namespace specdec::cuda {

template <Variant kVariant>
class ChainActions : ChainView<kVariant> {
  SPECDEC_CHAIN_VIEW(kVariant);

 public:
  __device__ ChainActions(BlockGroup& group, const ChainJob& job)
      : View(job, group.task<ChainTask>()), group_(group) {}

  // Computes the tile statistics of the current row and of its draft, side by side.
  __device__ void fill() const {
    if (thread_id() == 0) prepare_fills();
    __syncthreads();
    const int which = t_.row_fills[kTarget].beside_another ? warp_id() % 2
                      : measures(kTarget)                  ? kTarget
                                                           : kDraft;
    fill_tile_stats<Reads>(group_, t_.row_fills[which], kGeneral);
  }

  // kMeasureAll and kMeasure: computes row statistics from tile statistics.
  __device__ void measure() {
    if (measures_all() || !knows_row()) measure_rows();
    if constexpr (kGeneral) {
      if (!measures_all() && t_.has_draft && sparse() && !t_.draft.invalid_at_token) {
        look_up_sparse(group_, t_.draft);
      }
    }
  }

 private:
  // The use of the target row's tile statistics once filters are applied.
  __device__ Want target_want() const {
    return direct() ? Want::kLinear : rule_is(Rule::kMatch) ? Want::kGumbel : Want::kMass;
  }

  // For one thread.
  __device__ void prepare_fills() const {
    const int split = t_.filling ? t_.own_split : 0, splits = t_.filling ? job_.plan.splits : 1;
    const bool both = measures(kTarget) && measures(kDraft);
    const auto rate = [](float temperature) { return rate_of(inverse_temperature(temperature)); };
    t_.row_fills[kTarget] = {t_.row,
                             t_.tile_stats,
                             rate(t_.params.temperature),
                             first_want(target_want(), filtered(), t_.greedy),
                             {t_.seed, t_.position + t_.i, kSharedStream},
                             split,
                             splits,
                             both};
    t_.row_fills[kDraft] = {t_.draft.row,
                            t_.draft_tile_stats,
                            rate(t_.draft_temperature),
                            Want::kMass,
                            {},
                            split,
                            splits,
                            both};
  }

  __device__ bool measures_all() const { return action_is(Action::kMeasureAll); }

  // Measures the current row and its draft, or all rows: then the blocks of the group take turns,
  // and each tells the others what it found. With the statistics the entry of the drafted token is
  // read, so that no test waits for it. The result for a row that was not filled has no meaning and
  // is not used.
  __device__ void measure_rows() {
    const int blocks = measures_all() ? static_cast<int>(group_.size()) : 1;
#pragma unroll 1
    for (int turn = measures_all() ? static_cast<int>(group_.rank()) : 0; turn < turns();
         turn += blocks) {
      const Which which = turn < targets() ? kTarget : kDraft;
      if (!measures_all() && !measures(which)) continue;
      const int64_t row = row_of_turn(turn);
      const MeasuredRow measured = measure_row(row, which);
      if (!measures_all()) {
        if (thread_id() == 0) t_.measured[which] = measured;
      } else if (thread_id() < blocks) {
        *group_.remote(measured_row(row, which), thread_id()) = measured;
      }
    }
    if (measures_all()) group_.sync();
  }

  // Target rows come first.
  __device__ int targets() const {
    return measures_all() ? static_cast<int>(t_.num_drafts) + (t_.no_bonus ? 0 : 1) : 1;
  }
  __device__ int turns() const {
    // Rows of probabilities are not measured.
    const bool draft_rows = kVariant != Variant::kProbs && reads_draft() && !t_.greedy &&
                            p_.draft.form == DraftForm::kRows;
    return targets() + (!draft_rows ? 0 : measures_all() ? static_cast<int>(t_.num_drafts) : 1);
  }
  __device__ int64_t row_of_turn(int turn) const {
    return (measures_all() ? 0 : t_.i) + (turn < targets() ? turn : turn - targets());
  }

  __device__ MeasuredRow measure_row(int64_t row, Which which) {
    RowView view = which == kTarget
                       ? target_row(p_, t_, row)
                       : row_of(draft_source(), t_.b, draft_row(p_, t_, row), Read::kLogits);
    view.read = Reads::of(view.read);
    const TileStats tile_stats = tile_stats_of(row, which);
    // The entry is loaded while these are under way.
    const TileRun run(tile_stats, view.warp_tiles());
    MeasuredRow measured;
    measured.entry = entry_of_draft(row, which);
    measured.stats = read_row_stats(
        group_, view, tile_stats, run,
        which == kTarget ? t_.params : SequenceParams{t_.draft_temperature, 0, 1, 0},
        which == kTarget && filtered(), which == kTarget ? target_want() : Want::kMass,
        {t_.seed, t_.position + static_cast<uint64_t>(row), kSharedStream}, measured.token);
    return measured;
  }

  __device__ TileStats tile_stats_of(int64_t row, Which which) const {
    if (!measures_all()) return which == kTarget ? t_.tile_stats : t_.draft_tile_stats;
    return job_.tile_stats_array[t_.context * job_.context_tile_stats() + slot_of(row, which)];
  }

  // An entry, read in place: the wait for it is the one for the row's statistics.
  __device__ float known_at(RowView row, int64_t index) const {
    row.read = Reads::of(row.read);
    return at(row, index);
  }

  // The entry of drafted token i in its target row or in its draft row of logits, 0 if there is
  // none.
  __device__ float entry_of_draft(int64_t i, Which which) const {
    const int64_t x = i < t_.num_drafts ? drafted_token(p_, t_, i) : -1;
    if (which == kTarget) return x >= 0 && x < p_.vocab ? known_at(target_row(p_, t_, i), x) : 0;
    const DraftParams source = draft_source();
    const int64_t row = draft_row(p_, t_, i);
    if (x < 0 || !has_row(source, row)) return 0;
    const int64_t column = column_of(source.columns, source.vocab, x);
    return column < 0 ? 0 : known_at(row_of(source, t_.b, row, Read::kLogits), column);
  }

  BlockGroup& group_;
};

}  // namespace specdec::cuda
