#pragma once
// A pass over the target row together with the draft rows that are subtracted from it. The residual
// is computed warp tile by warp tile whenever it is needed and never stored.
#include "cuda/tree/sequence.cuh"

namespace specdec::cuda {

class ResidualScan {
 public:
  __device__ ResidualScan(BlockGroup& group, const TreeJob& job)
      : group_(group), job_(job), t_(group.task<TreeTask>()) {}

  // kScanResidual reads all warp tiles and leaves sums in the task. kReadResidual reads the tile of
  // the child's token, kDraw the tile where the drawn token lies.
  __device__ void run() {
    const TreeAction action = t_.action;
    const int64_t warp_tiles = t_.row.warp_tiles();
    if (action == TreeAction::kScanResidual) {
      group_.sync();  // no block reads these tile statistics any more
      pass(group_.first_warp_tile(0), group_.warp_tile_step(1), warp_tiles, 0);
      sum_columns_beyond();
      group_.sync();
      group_.exchange_buffer = 0;
      return add_up();
    }
    int64_t warp_tile = t_.x / kWarpTile, units = 0;
    if (action == TreeAction::kDraw) {
      const TileStats tile_stats = drawn_tile_stats();
      const TileRun run(tile_stats, warp_tiles);
      const float max = linear() ? run.largest(group_, tile_stats) : t_.stats.max;
      const WarpTileMasses masses(group_, tile_stats, warp_tiles, run, max, t_.stats.inv_t,
                                  linear());
      warp_tile = masses.choose(group_, residual_uniform(job_.p, t_, t_.depth), units);
    }
    pass(warp_tile, 1, warp_tile + 1, units);
  }

 private:
  // Tile statistics that a scan writes.
  enum Sum { kPositive, kSecond, kBeyond, kOverlap };  // kOverlap + i: at factor i
  __device__ TileStats scan_stats(int sum) const {
    return job_.tile_stats(t_.context, TreeJob::kScanStats + sum);
  }

  // The weights that are drawn from are probabilities, not exponentials of logits.
  __device__ bool linear() const { return t_.from_residual || t_.stats.direct; }
  __device__ TileStats drawn_tile_stats() const {
    return t_.from_residual ? scan_stats(kPositive) : t_.tile_stats;
  }
  __device__ bool draws() const { return t_.action == TreeAction::kDraw; }
  // The first record whose draft this pass subtracts; none where P itself is drawn from.
  __device__ int32_t first_draft() const {
    return draws() && !t_.from_residual ? kNone : t_.first_draft;
  }

  // A warp tile of the target row (node < 0), or of the draft row of a record.
  __device__ void load(int32_t node, int64_t warp_tile, Packed& out) const {
    const bool target = node < 0;
    if (!target && !t_.records[node].draft.pairs(t_.row.wide())) return;
    load_warp_tile(target ? t_.row : t_.records[node].draft.row.part(0, t_.row.vocab), warp_tile,
                   out);
  }

  // Goes through the target row and all draft rows of one warp tile, then through those of the next
  // one. While one row is used, the one after it is being loaded. Rows are named by their records,
  // the target row by kNone. `units` is the mass in this tile before the token that is drawn.
  __device__ void pass(int64_t warp_tile, int64_t step, int64_t end, int64_t units) const {
    constexpr int32_t kNotStarted = kNone - 1;
    int32_t current = kNotStarted, next = kNone;
    int64_t next_warp_tile = warp_tile;
    Packed next_loaded = {};
    float values[kPerLane];
    bool valid = true;
#pragma unroll 1
    while (current != kNotStarted || next_warp_tile < end) {
      const Packed loaded = next_loaded;
      if (next_warp_tile < end) load(next, next_warp_tile, next_loaded);
      if (current == kNone) {
        unpack(t_.row, loaded, values);
        weigh_target(warp_tile, values);
        valid = true;
      } else if (current >= 0) {
        valid &= subtract(current, warp_tile, loaded, values);
      }
      if (current != kNotStarted && next == kNone) {
        if (t_.action == TreeAction::kScanResidual) {
          store(warp_tile, values, __all_sync(kAllLanes, valid));
        } else {
          pick(warp_tile, values, units);
        }
        if (next_warp_tile >= end) return;
      }
      current = next;
      warp_tile = next_warp_tile;
      next = current < 0 ? first_draft() : t_.records[current].next_draft;
      if (next < 0) next_warp_tile += step;
    }
  }

  // Turns the target row into cP; for kEntropy, into the term of each token.
  __device__ void weigh_target(int64_t warp_tile, float (&values)[kPerLane]) const {
    if (t_.scan == ScanKind::kEntropy && !draws()) {
      weigh_entropy(values, t_.stats);
      return;
    }
    const bool own = draws() && !t_.from_residual;  // relative to the maximum of this warp tile
    if (!own) {
      ScaledTarget(t_.stats, t_.direct, t_.target_scale).normalise_all(values);
    } else if (!t_.direct) {
      weigh_tile(values, t_.tile_stats.maxima[warp_tile], rate_of(t_.stats.inv_t),
                 t_.stats.threshold);
    }
  }

  // Subtracts the draft of a record. The last one is subtracted after clipping at 0; for all kinds
  // of scan but kResidual, `combine` does that, with the values so far set aside.
  __device__ bool subtract(int32_t node, int64_t warp_tile, const Packed& loaded,
                           float (&values)[kPerLane]) const {
    const NodeRecord& r = t_.records[node];
    const bool last = node == t_.last_draft;
    if (last) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = fmaxf(values[j], 0.0f);
    }
    const bool apart = last && t_.scan != ScanKind::kResidual;
    if (apart) {
      float* const held = this->held();
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        held[j * kThreads] = values[j];
        values[j] = 0;
      }
    }
    const bool valid = subtract_draft(r.draft, apart ? -1.0f : r.scale, t_.row.vocab, t_.row.wide(),
                                      warp_tile, loaded, values);
    if (apart) combine(r, warp_tile, valid, values);
    return valid;
  }

  // kPerLane values of this thread, in shared memory that only selections use otherwise: there are
  // no registers to spare.
  __device__ float* held() const {
    static_assert(sizeof(Shared::bins) >= kPerLane * kThreads * sizeof(float), "fits");
    return reinterpret_cast<float*>(shared_memory()->bins) + thread_id();
  }

  // Combines Q of the last draft with the values set aside; `q` becomes the residual.
  __device__ void combine(const NodeRecord& r, int64_t warp_tile, bool valid,
                          float (&q)[kPerLane]) const {
    const float* const held = this->held();
    if (t_.scan == ScanKind::kOverlaps) return store_overlaps(warp_tile, q);
    if (t_.scan == ScanKind::kKSeqResidual) {
      const auto inverse = static_cast<float>(1 / t_.high), share = r.scale;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const float p = held[j * kThreads];
        q[j] = p - share * fminf(q[j], p * inverse);
      }
      return;
    }
    uint32_t excluded, excluded_from_draft;
    mark_excluded(warp_tile, excluded, excluded_from_draft);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) q[j] = excluded_from_draft >> j & 1 ? 0.0f : q[j];
    if (t_.action == TreeAction::kScanResidual) {
      store_positive(scan_stats(kSecond), warp_tile, q, t_.row.wide(), 1.0f,
                     __all_sync(kAllLanes, valid));
    }
    // The top tokens of rule top_k_plus_one remain in the residual.
    if (job_.p.rule != TreeRule::kMultiDraftWor) excluded = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
      q[j] = excluded >> j & 1 ? 0.0f : held[j * kThreads] - r.scale * q[j];
  }

  // Bits for the elements of this lane that are excluded tokens, and for those among them that are
  // excluded from the last draft.
  __device__ void mark_excluded(int64_t warp_tile, uint32_t& all, uint32_t& from_draft) const {
    all = from_draft = 0;
    for (int32_t k = 0; k < t_.num_excluded; ++k) {
      const int64_t index = t_.excluded[k].token - warp_tile * kWarpTile;
      if (index < 0 || index >= kWarpTile) continue;
      const auto i = static_cast<int>(index);
      if (holder(t_.row.wide(), i) != lane_id()) continue;
      const uint32_t bit = 1u << element(t_.row.wide(), i);
      all |= bit;
      if (excluded_from_last(k)) from_draft |= bit;
    }
  }

  // Sums of min(Q, P / rho). Each is at most 1, so the units of a row fit an integer.
  __device__ void store_overlaps(int64_t warp_tile, const float (&q)[kPerLane]) const {
    const float* const p = held();
#pragma unroll 1
    for (int i = 0; i < kFactorsAtOnce; ++i) {
      const auto inverse = static_cast<float>(1 / t_.factors[i]);
      float least[kPerLane];
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) least[j] = fminf(q[j], p[j * kThreads] * inverse);
      const int64_t units = warp_mass(lane_units(least, t_.row.wide()));
      if (lane_id() == 0) scan_stats(kOverlap + i).units[warp_tile] = units;
    }
  }

  __device__ void store(int64_t warp_tile, const float (&values)[kPerLane], bool valid) const {
    if (job_.p.rule == TreeRule::kTraversal) {
      store_positive(scan_stats(kSecond), warp_tile, values, t_.row.wide(), -1.0f, true);
    }
    store_positive(scan_stats(kPositive), warp_tile, values, t_.row.wide(), 1.0f, valid);
  }

  // Takes the value at the child's token, or the token where the running mass passes `units`.
  __device__ void pick(int64_t warp_tile, float (&values)[kPerLane], int64_t units) const {
    if (!draws()) {
      const auto index = static_cast<int>(t_.x - warp_tile * kWarpTile);
      const int mine = element(t_.row.wide(), index);
      float value = 0;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) value = j == mine ? values[j] : value;
      value = __shfl_sync(kAllLanes, value, holder(t_.row.wide(), index));
      if (thread_id() == 0) t_.residual_at_x = fmaxf(value, 0.0f);
      return;
    }
    if (linear()) {
      const TileStats tile_stats = drawn_tile_stats();
      const float inverse = inverse_scale(tile_stats.maxima[warp_tile]);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = values[j] > 0 ? values[j] * inverse : 0.0f;
    }
    const int64_t token = warp_tile * kWarpTile + warp_tile_pick(values, t_.row.wide(), units);
    if (thread_id() == 0) t_.token = token;
  }

  // Sums Q over the columns that no target token has, without the excluded tokens there.
  __device__ void sum_columns_beyond() const {
    if (t_.last_draft < 0 || t_.scan == ScanKind::kEntropy) return;
    const DraftDistribution& d = t_.records[t_.last_draft].draft;
    sum_beyond(group_.first_warp_tile(0), group_.warp_tile_step(1), d, t_.row.vocab,
               scan_stats(kBeyond), [&](int64_t first, bool wide, float (&values)[kPerLane]) {
                 if (d.columns == nullptr) zero_excluded(wide, first, values);
               });
  }

  __device__ void zero_excluded(bool wide, int64_t begin, float (&values)[kPerLane]) const {
    for (int32_t k = 0; k < t_.num_excluded; ++k) {
      const int64_t index = t_.excluded[k].token - begin;
      if (index < 0 || index >= kWarpTile || !excluded_from_last(k)) continue;
      const auto i = static_cast<int>(index);
      const int mine = holder(wide, i) == lane_id() ? element(wide, i) : -1;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = j == mine ? 0.0f : values[j];
    }
  }

  // Whether excluded token k is excluded from the draft subtracted last.
  __device__ bool excluded_from_last(int32_t k) const {
    return same_draft_row(job_.p, t_.b, t_.excluded[k].node, t_.last_draft);
  }

  __device__ void add_up() {
    const int64_t warp_tiles = t_.row.warp_tiles();
    if (t_.scan == ScanKind::kOverlaps) {
#pragma unroll 1
      for (int i = 0; i < kFactorsAtOnce; ++i) {
        const TileStats tile_stats = scan_stats(kOverlap + i);
        int64_t units = 0;
        for (int64_t s = thread_id(); s < warp_tiles; s += kThreads) units += tile_stats.units[s];
        units = group_.sum(units);
        if (thread_id() == 0) t_.overlaps[i] = fmin(1.0, static_cast<double>(units) / kUnit);
      }
    }
    const bool excludes = t_.scan == ScanKind::kExcluding || t_.scan == ScanKind::kRemainingMass;
    const bool has_draft = t_.last_draft >= 0 && t_.scan != ScanKind::kEntropy;
    const int64_t size =
        has_draft ? columns_beyond(t_.records[t_.last_draft].draft, t_.row.vocab) : 0;
    double positive = 0, second = 0, mass_beyond = 0;
#pragma unroll 1
    for (int which = 0; which < 3; ++which) {
      if (which == kSecond && !excludes && job_.p.rule != TreeRule::kTraversal) continue;
      if (which == kBeyond && size == 0) continue;
      const double sum =
          stored_sum(group_, scan_stats(which),
                     which == kBeyond ? (size + kWarpTile - 1) / kWarpTile : warp_tiles);
      if (which == kPositive) positive = sum;
      if (which == kSecond) second = sum;
      if (which == kBeyond) mass_beyond = sum;
    }
    if (has_draft && t_.records[t_.last_draft].draft.lists_tokens()) {
      mass_beyond = mass_beyond_of_few(t_.records[t_.last_draft].draft);
    }
    if (thread_id() != 0) return;
    t_.drafts_valid = positive >= 0 && second >= 0 && mass_beyond >= 0;
    t_.positive_sum = positive;
    // With a column map, the scan above went through the whole row to validate it; its mass is
    // already counted token by token.
    if (has_draft && t_.records[t_.last_draft].draft.columns != nullptr && size > 0)
      mass_beyond = 0;
    t_.second_sum = second + (excludes ? 1.0 : t_.residual_mass) * mass_beyond;
  }

  // The mass of a one-hot or sparse draft at ids that the target does not have.
  __device__ double mass_beyond_of_few(const DraftDistribution& d) {
    if (d.form == DraftForm::kOneHot) return d.token >= t_.row.vocab ? 1 : 0;
    double mass = 0;
    for (int64_t k = thread_id(); k < d.row.vocab; k += kThreads) {
      const int64_t id = d.id(k);
      if (id < t_.row.vocab) continue;
      bool excluded = false;
      for (int32_t i = 0; i < t_.num_excluded; ++i) {
        excluded |= t_.excluded[i].token == id && excluded_from_last(i);
      }
      if (!excluded) mass += static_cast<double>(at(d.row, k));
    }
    return group_.sum(mass);
  }

  BlockGroup& group_;
  const TreeJob& job_;
  TreeTask& t_;
};

}  // namespace specdec::cuda
