#pragma once
// One pass over the target's row and those of the drafts that were subtracted from it.
#include "cuda/tree/sequence.cuh"

namespace specdec::cuda {

class TreeScan {
 public:
  __device__ TreeScan(BlockGroup& group, const TreeJob& job)
      : group_(group), job_(job), t_(group.task<TreeTask>()) {}

  // Of all warp_tiles, to slots and then to sums; or of the one that holds the candidate's token,
  // or a drawn one.
  __device__ void run() {
    const TreeAction action = t_.action;
    const int64_t warp_tiles = t_.row.warp_tiles();
    if (action == TreeAction::kScan) {
      group_.sync();  // nobody reads these slots any more
      pass(group_.first_warp_tile(0), group_.warp_tile_step(1), warp_tiles, 0);
      rest_of_draft();
      group_.sync();
      group_.turn = 0;
      return add_up();
    }
    int64_t warp_tile = t_.x / kWarpTile, rest = 0;
    if (action == TreeAction::kDraw) {
      const TileStats tile_stats = t_.residual ? extra_tile_stats(0) : t_.tile_stats;
      const float max = linear() ? max_of(group_, tile_stats.maxima, warp_tiles) : t_.stats.max;
      const WarpTileMasses masses(group_, tile_stats, warp_tiles, max, t_.stats.inv_t, linear());
      warp_tile = masses.choose(group_, draw_uniform(), rest);
    }
    pass(warp_tile, 1, warp_tile + 1, rest);
  }

 private:
  __device__ bool linear() const { return t_.residual || t_.stats.direct; }
  __device__ bool draws() const { return t_.action == TreeAction::kDraw; }
  // What is subtracted in this pass; none where P itself is wanted.
  __device__ int32_t first_entry() const { return draws() && !t_.residual ? kNone : t_.first; }

  __device__ double draw_uniform() const { return residual_uniform(job_.p, t_, t_.depth); }

  __device__ TileStats extra_tile_stats(int i) const {
    return job_.tile_stats_array[t_.context * job_.context_tile_stats() + 4 + i];
  }

  // Of an entry, or of the target's row.
  __device__ void load(int32_t entry, int64_t warp_tile, Packed& out) const {
    const bool target = entry < 0;
    if (!target && !t_.records[entry].draft.pairs(t_.row.wide())) return;
    load_warp_tile(target ? t_.row : t_.records[entry].draft.row.part(0, t_.row.vocab), warp_tile,
                   out);
  }

  // Row by row of one warp_tile, then the next warp_tile. What follows is on its way while a row is
  // weighed.
  __device__ void pass(int64_t warp_tile, int64_t step, int64_t end, int64_t rest) const {
    constexpr int32_t kNothing = kNone - 1;
    int32_t at = kNothing, next_at = kNone;
    int64_t next_warp_tile = warp_tile;
    Packed next = {};
    float values[kPerLane];
    bool valid = true;
#pragma unroll 1
    while (at != kNothing || next_warp_tile < end) {
      const Packed now = next;
      if (next_warp_tile < end) load(next_at, next_warp_tile, next);
      if (at == kNone) {
        unpack(t_.row, now, values);
        weigh_target(warp_tile, values);
        valid = true;
      } else if (at >= 0) {
        valid &= subtract(at, warp_tile, now, values);
      }
      if (at != kNothing && next_at == kNone) {
        if (t_.action == TreeAction::kScan) {
          store(warp_tile, values, __all_sync(kAllLanes, valid));
        } else {
          pick(warp_tile, values, rest);
        }
        if (next_warp_tile >= end) return;
      }
      at = next_at;
      warp_tile = next_warp_tile;
      next_at = at < 0 ? first_entry() : t_.records[at].next;
      if (next_at < 0) next_warp_tile += step;
    }
  }

  // cP, or what else is wanted of the target.
  __device__ void weigh_target(int64_t warp_tile, float (&values)[kPerLane]) const {
    if (t_.scan == Scan::kEntropy && !draws()) {
      const WeightParams weight_params{t_.stats.max, rate_of(t_.stats.inv_t), t_.stats.threshold};
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const float w = weight_params.weight(values[j]);
        values[j] = w > 0 ? w * (t_.stats.max - values[j]) : 0.0f;
      }
      return;
    }
    const bool own = draws() && !t_.residual;  // relative to the warp_tile's own maximum
    if (t_.direct) {
      const double c = own ? 1.0 : t_.c;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = static_cast<float>(c * values[j]);
      return;
    }
    weigh(values, {own ? t_.tile_stats.maxima[warp_tile] : t_.stats.max, rate_of(t_.stats.inv_t),
                   t_.stats.threshold});
    const float scale = own ? 1.0f : static_cast<float>(exp(-t_.stats.log_sum) * t_.c);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) values[j] *= scale;
  }

  // The values less an entry. The last one is subtracted from what the others leave.
  __device__ bool subtract(int32_t entry, int64_t warp_tile, const Packed& loaded,
                           float (&values)[kPerLane]) const {
    const TreeRecord& r = t_.records[entry];
    const bool last = entry == t_.last;
    if (last) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = fmaxf(values[j], 0.0f);
    }
    const bool apart = last && t_.scan != Scan::kLeft;
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

  // Sixteen values of this thread, in memory that a selection would take: registers are short.
  __device__ float* held() const {
    static_assert(sizeof(Shared::bins) >= kPerLane * kThreads * sizeof(float), "fits");
    return reinterpret_cast<float*>(group_.shared->bins) + thread_id();
  }

  // `q` becomes what is left of the values held.
  __device__ void combine(const TreeRecord& r, int64_t warp_tile, bool valid,
                          float (&q)[kPerLane]) const {
    const float* const held = this->held();
    if (t_.scan == Scan::kFactors) return store_factors(warp_tile, q);
    if (t_.scan == Scan::kAccepted) {
      const auto inverse = static_cast<float>(1 / t_.high), part = r.scale;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const float p = held[j * kThreads];
        q[j] = p - part * fminf(q[j], p * inverse);
      }
      return;
    }
    uint32_t gone, off;
    mark_tried(warp_tile, gone, off);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) q[j] = off >> j & 1 ? 0.0f : q[j];
    if (t_.action == TreeAction::kScan) {
      store_positive(extra_tile_stats(1), warp_tile, q, 1.0f, __all_sync(kAllLanes, valid));
    }
    if (job_.p.rule != TreeRule::kMultiDraftWor) gone = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
      q[j] = gone >> j & 1 ? 0.0f : held[j * kThreads] - r.scale * q[j];
  }

  // Elements of this lane that are tokens tried; and of them those of the last entry's law.
  __device__ void mark_tried(int64_t warp_tile, uint32_t& gone, uint32_t& off) const {
    gone = off = 0;
    for (int32_t k = 0; k < t_.num_tried; ++k) {
      const int64_t index = t_.tried[k].token - warp_tile * kWarpTile;
      if (index < 0 || index >= kWarpTile) continue;
      const auto i = static_cast<int>(index);
      if (holder(t_.row.wide(), i) != lane_id()) continue;
      const uint32_t bit = 1u << element(t_.row.wide(), i);
      gone |= bit;
      if (of_last_law(k)) off |= bit;
    }
  }

  // Sums of min(Q, P / rho), at most 1 each: in units of 2^-50.
  __device__ void store_factors(int64_t warp_tile, const float (&q)[kPerLane]) const {
    const float* const p = held();
#pragma unroll 1
    for (int i = 0; i < kFactorsAtOnce; ++i) {
      const auto inverse = static_cast<float>(1 / t_.rho[i]);
      float least[kPerLane];
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) least[j] = fminf(q[j], p[j * kThreads] * inverse);
      const int64_t units = warp_sum(lane_units(least));
      if (lane_id() == 0) extra_tile_stats(3 + i).units[warp_tile] = units;
    }
  }

  __device__ void store(int64_t warp_tile, const float (&values)[kPerLane], bool valid) const {
    if (job_.p.rule == TreeRule::kTraversal) {
      store_positive(extra_tile_stats(1), warp_tile, values, -1.0f, true);
    }
    store_positive(extra_tile_stats(0), warp_tile, values, 1.0f, valid);
  }

  // The value at the candidate's token, or the token where the mass passes `rest`.
  __device__ void pick(int64_t warp_tile, float (&values)[kPerLane], int64_t rest) const {
    if (!draws()) {
      const auto index = static_cast<int>(t_.x - warp_tile * kWarpTile);
      const int mine = element(t_.row.wide(), index);
      float value = 0;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) value = j == mine ? values[j] : value;
      value = __shfl_sync(kAllLanes, value, holder(t_.row.wide(), index));
      if (thread_id() == 0) t_.left = fmaxf(value, 0.0f);
      return;
    }
    if (linear()) {
      const TileStats tile_stats = t_.residual ? extra_tile_stats(0) : t_.tile_stats;
      const float inverse = inverse_scale(tile_stats.maxima[warp_tile]);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = values[j] > 0 ? values[j] * inverse : 0.0f;
    }
    const int64_t token = warp_tile * kWarpTile + warp_tile_pick(values, t_.row.wide(), rest);
    if (thread_id() == 0) t_.token = token;
  }

  // Q where the target has no token; tokens tried there are left out.
  __device__ void rest_of_draft() const {
    if (t_.last < 0 || t_.scan == Scan::kEntropy) return;
    const DraftDistribution& d = t_.records[t_.last].draft;
    const int64_t size = rest_size(d, t_.row.vocab);
    if (size == 0) return;
    const int64_t skip = d.row.vocab - size;
    const RowView rest = d.row.part(skip, size);
    const int64_t step = group_.warp_tile_step(1);
    for (int64_t warp_tile = group_.first_warp_tile(0); warp_tile < rest.warp_tiles();
         warp_tile += step) {
      float values[kPerLane];
      read_warp_tile(rest, warp_tile, values);
      const float top = d.weigh_all(values);
      if (d.columns == nullptr) leave_out_tried(rest.wide(), skip + warp_tile * kWarpTile, values);
      store_positive(extra_tile_stats(2), warp_tile, values, 1.0f,
                     __all_sync(kAllLanes, top < INFINITY));
    }
  }

  __device__ void leave_out_tried(bool wide, int64_t begin, float (&values)[kPerLane]) const {
    for (int32_t k = 0; k < t_.num_tried; ++k) {
      const int64_t index = t_.tried[k].token - begin;
      if (index < 0 || index >= kWarpTile || !of_last_law(k)) continue;
      const auto i = static_cast<int>(index);
      const int mine = holder(wide, i) == lane_id() ? element(wide, i) : -1;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = j == mine ? 0.0f : values[j];
    }
  }

  __device__ bool of_last_law(int32_t k) const {
    return same_draft_row(job_.p, t_.b, t_.tried[k].node, t_.last);
  }

  __device__ void add_up() {
    const int64_t warp_tiles = t_.row.warp_tiles();
    if (t_.scan == Scan::kFactors) {
#pragma unroll 1
      for (int i = 0; i < kFactorsAtOnce; ++i) {
        const TileStats tile_stats = extra_tile_stats(3 + i);
        int64_t units = 0;
        for (int64_t s = thread_id(); s < warp_tiles; s += kThreads) units += tile_stats.units[s];
        units = group_.sum(units);
        if (thread_id() == 0) t_.accepted_at[i] = fmin(1.0, static_cast<double>(units) * 0x1p-50);
      }
    }
    const bool off = t_.scan == Scan::kOff || t_.scan == Scan::kRest;
    const bool entry = t_.last >= 0 && t_.scan != Scan::kEntropy;
    const int64_t size = entry ? rest_size(t_.records[t_.last].draft, t_.row.vocab) : 0;
    double more = 0, second = 0, beyond = 0;
#pragma unroll 1
    for (int which = 0; which < 3; ++which) {
      if (which == 1 && !off && job_.p.rule != TreeRule::kTraversal) continue;
      if (which == 2 && size == 0) continue;
      const double sum = stored_sum(group_, extra_tile_stats(which),
                                    which == 2 ? (size + kWarpTile - 1) / kWarpTile : warp_tiles);
      if (which == 0) more = sum;
      if (which == 1) second = sum;
      if (which == 2) beyond = sum;
    }
    if (entry && t_.records[t_.last].draft.few()) beyond = few_beyond(t_.records[t_.last].draft);
    if (thread_id() != 0) return;
    t_.valid = is_finite(more) && is_finite(second) && is_finite(beyond);
    t_.more = more;
    // With a map the rest of the row is looked through, and all its tokens were counted already.
    if (entry && t_.records[t_.last].draft.columns != nullptr && size > 0) beyond = 0;
    t_.second = second + (off ? 1.0 : t_.mass) * beyond;
  }

  __device__ double few_beyond(const DraftDistribution& d) {
    if (d.form == DraftForm::kOneHot) return d.token >= t_.row.vocab ? 1 : 0;
    double mass = 0;
    for (int64_t k = thread_id(); k < d.row.vocab; k += kThreads) {
      const int64_t id = d.id(k);
      if (id < t_.row.vocab) continue;
      bool out = false;
      for (int32_t i = 0; i < t_.num_tried; ++i) out |= t_.tried[i].token == id && of_last_law(i);
      if (!out) mass += static_cast<double>(at(d.row, k));
    }
    return group_.sum(mass);
  }

  BlockGroup& group_;
  const TreeJob& job_;
  TreeTask& t_;
};

}  // namespace specdec::cuda
