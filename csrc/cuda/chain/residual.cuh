#pragma once
// The actions that sum over a row or draw from it: kEntropy, kCount, kResidual, kChoose and kDraw.
// They share the code that reads warp tiles, and the code that adds up what is known of them.
#include "cuda/chain/view.cuh"

namespace specdec::cuda {

template <Variant kVariant>
class ChainResidual : ChainView<kVariant> {
  SPECDEC_CHAIN_VIEW(kVariant);

 public:
  __device__ ChainResidual(BlockGroup& group, const ChainJob& job)
      : View(job, group.task<ChainTask>()), group_(group) {}

  __device__ void sum_or_draw() {
    const bool draws = action_is(Action::kDraw);
    if (!chooses() && !draws) {
      if (thread_id() == 0) prepare();
      wait_for_readers();
    }
    if constexpr (kGeneral) {
      if (action_is(Action::kResidual) && t_.state == State::kBlockFromEnd &&
          t_.sums_residual_of_few()) {
        sum_residual_of_few(group_, t_.draft, t_.row, t_.stats, t_.c, t_.positive, t_.negative);
        if (thread_id() == 0) t_.valid = true;
        return;
      }
    }
    if (!chooses()) visit_tiles();
    if (draws) return;
    if (kGeneral && action_is(Action::kResidual)) {
      sum_beyond(group_, t_.draft, t_.row.vocab, tile_stats_of(kBeyond),
                 [](int64_t, bool, float (&)[kPerLane]) {});
    }
    if (!chooses()) group_.sync();
    add_up();
  }

 private:
  // Afterwards no block reads the tile statistics that are written next. In the logits kernel a
  // sequence has one residual, and a barrier of the group lies between it and the one before.
  __device__ void wait_for_readers() const {
    kVariant == Variant::kLogits ? __syncthreads() : group_.sync();
  }

  // The sums over a row: the first three have tile statistics of their own.
  enum Sum { kPositive, kNegative, kBeyond, kDirect, kTargetMass };

  __device__ bool entropy() const { return kGeneral && action_is(Action::kEntropy); }
  __device__ bool counts() const { return kGeneral && action_is(Action::kCount); }
  __device__ bool chooses() const { return action_is(Action::kChoose); }

  __device__ int64_t warp_tiles_beyond() const {
    return kGeneral && action_is(Action::kResidual)
               ? (columns_beyond(t_.draft, t_.row.vocab) + kWarpTile - 1) / kWarpTile
               : 0;
  }

  __device__ TileStats tile_stats_of(int sum) const {
    if (sum >= kDirect) return t_.tile_stats;
    return job_
        .tile_stats_array[t_.context * job_.context_tile_stats() + 2 * job_.row_tile_stats() + sum];
  }

  // The tokens of which P or Q is summed. Beyond the target's vocabulary P is 0; the general kernel
  // sums Q there by itself, because only it needs that sum.
  __device__ int64_t tokens() const {
    const int64_t vocab = t_.row.vocab, columns = p_.draft.vocab;
    const bool longer = !kGeneral && action_is(Action::kResidual) && columns > vocab &&
                        t_.draft.form != DraftForm::kOneHot;
    return longer ? columns : vocab;
  }
  __device__ int warp_tiles() const {
    return static_cast<int>((tokens() + kWarpTile - 1) / kWarpTile);
  }

  // What the loops over warp tiles need. For one thread.
  __device__ void prepare() const {
    t_.scaled_target = ScaledTarget(t_.stats, direct() || entropy() || counts(), t_.c);
    t_.residual_loops = false;
    if (!action_is(Action::kResidual)) return;
    t_.residual_loops =
        !rule_is(Rule::kBlock) && ResidualRows::serves(row(), t_.scaled_target, draft());
    t_.residual_rows = ResidualRows(row(), t_.scaled_target, draft(), p_.lenience,
                                    tile_stats_of(kPositive), t_.tile_stats, step());
  }

  // From one warp tile of a warp to its next one.
  __device__ int step() const { return static_cast<int>(group_.warp_tile_step(1)); }

  // Reads warp tiles of the row, and of the draft's. kEntropy, kCount and kResidual store the sum
  // of each; kDraw reads the chosen one and picks the token.
  __device__ void visit_tiles() const {
    auto warp_tile =
        static_cast<int>(action_is(Action::kDraw) ? t_.chosen_tile : group_.first_warp_tile(0));
    for (;; warp_tile += step()) {
      if (action_is(Action::kResidual) && t_.residual_loops) {
        warp_tile = sum_whole_tiles(warp_tile);
      }
      if (warp_tile >= warp_tiles()) break;
      float values[kPerLane];
      const bool valid = read_values(warp_tile, values);
      if (action_is(Action::kDraw)) return pick(warp_tile, values);
      store(warp_tile, values, __all_sync(kAllLanes, valid));
    }
  }

  __device__ int sum_whole_tiles(int warp_tile) const {
    const ResidualRows& rows = t_.residual_rows;
    const auto sum = [&](auto type, auto probs) {
      return sum_residual<decltype(type)::value, decltype(probs)::value>(rows, warp_tile);
    };
    if (kVariant == Variant::kProbs || direct()) {
      if constexpr (kVariant == Variant::kLogits) return warp_tile;
      return sum(DTypeOf<DType::kFloat32>(), std::true_type());
    }
    switch (t_.row.dtype) {
      case DType::kFloat32:
        return sum(DTypeOf<DType::kFloat32>(), std::false_type());
      case DType::kBFloat16:
        return sum(DTypeOf<DType::kBFloat16>(), std::false_type());
      default:
        if constexpr (!kGeneral) return warp_tile;
        return sum(DTypeOf<DType::kFloat16>(), std::false_type());
    }
  }

  // The values of a warp tile: cP - lQ, P on the scale of its tile statistics, the terms of the
  // entropy, or 1 for each likelier token. Returns false in some lane if the draft row, or a direct
  // target row, is not valid there.
  __device__ bool read_values(int warp_tile, float (&values)[kPerLane]) const {
    Packed draft_words;
    if constexpr (kGeneral) {
      Packed words;
      load_warp_tile(row(), warp_tile, words);
      draft_words = {};
      if (!target_alone()) {
        load_draft(draft(), tokens(), t_.row.wide(), warp_tile, draft_words);
      }
      unpack(row(), words, values);
    } else {
      const TileValues tile = read(row(), t_.row.vocab, warp_tile);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = tile.values[j];
    }
    const bool valid = !direct() || action_is(Action::kDraw) || fill_direct(warp_tile, values);
    if (entropy()) {
      weigh_entropy(values, t_.stats);
    } else if (counts()) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = values[j] > t_.entry ? 1.0f : 0.0f;
    } else if (!target_alone()) {
      t_.scaled_target.normalise_all(values);
      return subtract(warp_tile, draft_words, values) && valid;
    } else if (!direct()) {
      weigh_tile(values, t_.tile_stats.maxima[warp_tile], rate_of(t_.stats.inv_t),
                 filtered() ? t_.stats.threshold : -INFINITY);
    }
    return true;
  }

  // The entries of a warp tile of a row, of which the first `size` count.
  __device__ TileValues read(const RowView& row, int64_t size, int warp_tile) const {
    return call_read_warp_tile<Reads>(row.data, row.vocab < size ? row.vocab : size, row.dtype,
                                      row.read, warp_tile);
  }

  __device__ bool subtract(int warp_tile, const Packed& draft_words,
                           float (&values)[kPerLane]) const {
    const bool wide = t_.row.wide();
    if constexpr (kGeneral) {
      return subtract_draft(draft(), p_.lenience, tokens(), wide, warp_tile, draft_words, values);
    }
    if (draft().lists_tokens()) {
      subtract_listed(draft(), p_.lenience, tokens(), wide, warp_tile, values);
      return true;
    }
    TileValues q = read(draft().row, tokens(), warp_tile);
    return subtract_entries(draft(), p_.lenience, q.values, values);
  }

  // Whether an action reads no draft.
  __device__ bool target_alone() const {
    return entropy() || counts() || (action_is(Action::kDraw) && !t_.residual);
  }

  __device__ void store(int warp_tile, const float (&values)[kPerLane], bool valid) const {
    const bool wide = t_.row.wide();
    if (rule_is(Rule::kBlock)) {
      store_positive(tile_stats_of(kNegative), warp_tile, values, wide, -1.0f, true);
    }
    store_positive(tile_stats_of(kPositive), warp_tile, values, wide, 1.0f, valid);
  }

  __device__ void pick(int warp_tile, float (&values)[kPerLane]) const {
    if (t_.residual || direct()) {
      const float scale = tile_stats_of(t_.residual ? kPositive : kTargetMass).maxima[warp_tile];
      const float inverse = inverse_scale(scale);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = values[j] > 0 ? values[j] * inverse : 0.0f;
    }
    const int index = warp_tile_pick(values, t_.row.wide(), t_.chosen_rest);
    if (thread_id() == 0) t_.token = int64_t{warp_tile} * kWarpTile + index;
  }

  // Computes the tile statistics of a direct row, of which only one entry was read before. Returns
  // whether the warp tile is valid.
  __device__ bool fill_direct(int64_t warp_tile, const float (&values)[kPerLane]) const {
    float top = warp_tile_max(values);
    const int64_t units = linear_units(values, t_.row.wide(), top);
    if (lane_id() == 0) {
      t_.tile_stats.maxima[warp_tile] = top;
      t_.tile_stats.units[warp_tile] = units;
    }
    return is_finite(top);
  }

  // Adds up what was stored of each warp tile, and chooses the tile to draw from.
  __device__ void add_up() {
    bool proves_mass = false;
#pragma unroll 1
    for (int which = chooses() ? kTargetMass : kPositive;
         which <= (chooses() ? kTargetMass : kDirect); ++which) {
      // A residual above 0 has no entry of P that is not valid, and proves that P has mass.
      if ((which == kNegative && !rule_is(Rule::kBlock)) ||
          (which == kBeyond && warp_tiles_beyond() == 0) ||
          (which == kDirect && (!direct() || proves_mass))) {
        continue;
      }
      const double sum =
          sum_and_choose(which, which == kBeyond ? warp_tiles_beyond() : warp_tiles());
      proves_mass |= which == kPositive && sum > 0;
      if (thread_id() == 0 && which <= kDirect) t_.sums[which] = sum;
    }
    if (chooses()) return;
    double mass_beyond = 0;
    if constexpr (kGeneral) {
      if (action_is(Action::kResidual) && sparse()) mass_beyond = sparse_mass_beyond();
    }
    if (thread_id() != 0) return;
    if (!(kGeneral && sparse()) && warp_tiles_beyond() > 0) mass_beyond = t_.sums[kBeyond];
    const double positive = t_.sums[kPositive];
    if (entropy()) {
      t_.found = t_.stats.entropy(positive);
      return;
    }
    if (counts()) {
      t_.found = positive;
      return;
    }
    if (direct()) {
      t_.stats = {};
      t_.stats.direct = true;
      t_.stats.valid = positive > 0 || t_.sums[kDirect] > 0;
    }
    t_.positive = positive;
    t_.valid = is_finite(positive) && mass_beyond >= 0;
    if (!kGeneral) return;
    if (t_.draft.form == DraftForm::kOneHot && t_.draft.token >= t_.row.vocab) mass_beyond = 1;
    // With a map from tokens to columns `mass_beyond` is the sum of the whole row, which was read
    // only to validate it; `negative` has counted Q token by token already.
    const bool mapped = t_.draft.columns != nullptr && !t_.draft.lists_tokens();
    t_.negative = (rule_is(Rule::kBlock) ? t_.sums[kNegative] : 0) + (mapped ? 0.0 : mass_beyond);
  }

  // The sum over the row of what was stored; NaN if a warp tile was not valid, else infinite if its
  // sum was.
  __device__ double sum_and_choose(int which, int64_t warp_tiles) {
    const TileStats tile_stats = tile_stats_of(which);
    const bool linear = which != kTargetMass || direct();
    const TileRun run(tile_stats, warp_tiles);
    const float max = linear ? run.largest(group_, tile_stats) : t_.stats.max;
    const WarpTileMasses masses(group_, tile_stats, warp_tiles, run, max, t_.stats.inv_t, linear);
    const double sum = masses.sum();
    const bool draws = (which == kPositive && !entropy() && !counts()) || which == kTargetMass;
    if (draws && sum > 0 && is_finite(sum)) {
      int64_t rest;
      const int64_t tile = masses.choose(group_, residual_uniform(p_, t_, t_.i), rest);
      if (thread_id() == 0) {
        t_.chosen_tile = tile;
        t_.chosen_rest = rest;
      }
    }
    return sum;
  }

  __device__ double sparse_mass_beyond() {
    double mass = 0;
    for (int64_t k = thread_id(); k < t_.draft.row.vocab; k += kThreads) {
      if (t_.draft.id(k) >= t_.row.vocab) mass += static_cast<double>(at(t_.draft.row, k));
    }
    return group_.sum(mass);
  }

  BlockGroup& group_;
};

}  // namespace specdec::cuda
