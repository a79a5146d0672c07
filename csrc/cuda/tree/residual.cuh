#pragma once
// A pass over a target row together with the draft rows that are subtracted from it, by one block.
// The residual is computed warp tile by warp tile whenever it is needed and never stored.
#include "cuda/tree/sequence.cuh"

namespace specdec::cuda {

// The sums that a scan computes from P and Q.
enum class ScanKind : int32_t {
  kResidual,       // cP less the drafts; for rule traversal also where the last draft exceeds that
  kExcluding,      // the same with Q zeroed at the excluded tokens, and the mass of that Q
  kRemainingMass,  // that mass alone
  kOverlaps,       // k_seq: sums of min(Q, P / rho) at some factors rho
  kKSeqResidual    // k_seq: P less a share of min(Q, P / rho)
};

// What a pass is for.
enum class ScanUse : int32_t { kSum, kRead, kDraw };

// The target row after the last node of the path and what is subtracted from it, in shared memory.
struct TreeStep {
  int64_t node;             // last node of the path
  int64_t depth;            // of the token after it
  int64_t children;         // how many there are
  int64_t child, x;         // the child being tried and its token
  int64_t token;            // what the target predicts, or what was drawn
  DraftDistribution draft;  // of the child
  RowView row;
  RowSummary target;
  ScaledTarget scaled;

  int32_t first_draft, last_draft;  // the drafts subtracted from the row
  bool summed;                      // the last scan has summed the residual of the row
  int32_t num_excluded;
  double target_scale;   // c, the factor of P
  double residual_mass;  // the scale of the next child's Q

  // What a scan has found:
  double positive_sum;  // the residual's mass
  double second_sum;    // the mass of Q outside the excluded tokens; under rule traversal, by how
                        // much Q exceeds the residual
  bool drafts_valid;    // the rows of the drafts are valid
  double overlaps[kFactorsAtOnce], factors[kFactorsAtOnce];  // k_seq: at factors rho
  double low, rho, low_gap, rho_gap;  // k_seq: the search, see k_seq.cuh; rho becomes the factor
  double beta;                        // its overlap
  float residual_at_x;
};

struct TreeShared : BlockShared {
  TreeSequence sequence;
  TreeStep step;
  int32_t accepted;
  float held[kPerLane * kThreads];  // values that a scan sets aside
};

class ResidualScan {
 public:
  __device__ ResidualScan(const TreeJob& job, TreeShared& s, ScanKind kind, ScanUse use)
      : block_(s),
        job_(job),
        q_(s.sequence),
        t_(s.step),
        records_(job.records_of(s.sequence.b)),
        excluded_(job.excluded + s.sequence.b * job.p.nodes),
        kind_(kind),
        use_(use) {}

  // kSum leaves sums in the step, kRead the residual at the child's token. kDraw returns a token,
  // with u from the residual whose sums the last kSum has left. For the whole block, which meets
  // before and after.
  __device__ int64_t run(double u) {
    // Rule traversal needs what the draft exceeds the residual by, also off the survivors.
    if (t_.target.listed >= 0 && job_.p.rule != TreeRule::kTraversal) return run_listed(u);
    int64_t first = warp_id(), step = kWarps, end = t_.row.warp_tiles(), units = 0;
    if (use_ == ScanUse::kDraw) {
      const Choice choice = choose_stored(block_, stats_of(TreeJob::kPositive), end, u);
      first = choice.warp_tile;
      units = choice.rest;
    } else if (use_ == ScanUse::kRead) {
      first = t_.x / kWarpTile;
    }
    if (use_ != ScanUse::kSum) {
      step = 1;
      end = first + 1;
    }
    pass(first, step, end, units);
    if (use_ == ScanUse::kSum) sum_columns_beyond();
    __syncthreads();
    if (use_ == ScanUse::kSum) add_up(true, true);
    __syncthreads();
    return first * kWarpTile + picked_;
  }

 private:
  // The same for a filtered row whose survivors are listed: nothing else has a residual. Of the
  // last draft the whole row is read for its mass, and once to learn whether it is valid.
  __device__ int64_t run_listed(double u) {
    const int64_t vocab = t_.row.vocab;
    if (use_ == ScanUse::kRead) {
      if (thread_id() == 0) t_.residual_at_x = fmaxf(listed_residual(at(t_.row, t_.x), t_.x), 0.0f);
      __syncthreads();
      return kNone;
    }
    Candidates& c = candidates_of<TreeShared>();
    load_list(job_.list(q_.b, t_.node), t_.target.listed, c);
    if (kind_ == ScanKind::kOverlaps) sum_listed_overlaps(c);
    float scale;
    const int64_t total =
        weigh_listed(block_, c, [&](float l, int64_t id) { return listed_residual(l, id); }, scale);
    if (use_ == ScanUse::kDraw) {
      const int64_t token = draw_listed(c, total, vocab, u);
      __syncthreads();
      return token;
    }
    const NodeRecord& r = records_[t_.last_draft];
    const bool reads = excludes() || (!r.draft.lists_tokens() && !r.draft.row_checked);
    if (reads) {
      for (int64_t warp_tile = warp_id(); warp_tile < t_.row.warp_tiles(); warp_tile += kWarps) {
        sum_draft(r, warp_tile);
      }
      sum_columns_beyond();
      __syncthreads();
    }
    add_up(false, reads);
    __syncthreads();
    if (thread_id() == 0) {
      const int exponent = static_cast<int>(bits_as<uint32_t>(scale) >> 23) - 127;
      t_.positive_sum = scaled(static_cast<double>(total), exponent - kUnitBits);
      records_[t_.last_draft].draft.row_checked |= reads && t_.drafts_valid;
    }
    __syncthreads();
    return kNone;
  }

  // The residual at a survivor with the logit l, as `pass` computes it.
  __device__ float listed_residual(float l, int64_t id) const {
    float value = t_.scaled.weight_params.weight(l) * t_.scaled.scale;
    for (int32_t e = t_.first_draft; e >= 0; e = records_[e].next_draft) {
      const NodeRecord& r = records_[e];
      const bool last = e == t_.last_draft;
      if (last) value = fmaxf(value, 0.0f);
      if (!last || kind_ == ScanKind::kResidual) {
        value = subtract_at(r.draft, r.scale, id, value);
        continue;
      }
      const float q = subtract_at(r.draft, -1.0f, id, 0.0f);
      if (kind_ == ScanKind::kKSeqResidual) {
        value -= r.scale * fminf(q, value * static_cast<float>(1 / t_.rho));
        continue;
      }
      const Exclusion excluded = exclusion_of(id);
      if (!excluded.from_draft) value -= r.scale * q;
      if (excluded.any && job_.p.rule == TreeRule::kMultiDraftWor) value = 0;
    }
    return value;
  }

  __device__ void sum_listed_overlaps(const Candidates& c) {
    const NodeRecord& r = records_[t_.last_draft];
    for (int i = 0; i < kFactorsAtOnce; ++i) {
      const auto inverse = static_cast<float>(1 / t_.factors[i]);
      int64_t units = 0;
      for (int k = thread_id(); k < static_cast<int>(c.count); k += kThreads) {
        const float p =
            t_.scaled.weight_params.weight(from_ordered_key(c.keys[k])) * t_.scaled.scale;
        const float q = subtract_at(r.draft, -1.0f, c.ids[k], 0.0f);
        units += units_of(fminf(q, p * inverse));
      }
      units = block_.sum(units);
      if (thread_id() == 0) t_.overlaps[i] = fmin(1.0, static_cast<double>(units) / kUnit);
    }
  }

  // Sums Q of the last draft over a warp tile, without the tokens excluded from it.
  __device__ void sum_draft(const NodeRecord& r, int64_t warp_tile) const {
    Packed words = {};
    load(t_.last_draft, warp_tile, words);
    float q[kPerLane] = {};
    const bool valid =
        subtract_draft(r.draft, -1.0f, t_.row.vocab, t_.row.wide(), warp_tile, words, q);
    zero_excluded(t_.row.wide(), warp_tile * kWarpTile, q);
    store_positive(stats_of(TreeJob::kSecond), warp_tile, q, t_.row.wide(), 1.0f,
                   __all_sync(kAllLanes, valid));
  }

  __device__ bool excludes() const {
    return kind_ == ScanKind::kExcluding || kind_ == ScanKind::kRemainingMass;
  }

  __device__ TileStats stats_of(int which) const { return job_.sum(q_.b, which); }

  // A warp tile of the target row (node < 0), or of the draft row of a record.
  __device__ void load(int32_t node, int64_t warp_tile, Packed& out) const {
    if (node >= 0 && !records_[node].draft.pairs(t_.row.wide())) return;
    load_warp_tile(node < 0 ? t_.row : records_[node].draft.row.part(0, t_.row.vocab), warp_tile,
                   out);
  }

  // Goes through the target row and all draft rows of one warp tile, then through those of the next
  // one. While one row is used, the one after it is being loaded. Rows are named by their records,
  // the target row by kNone. `units` is the mass in this tile before the token that is drawn.
  __device__ void pass(int64_t warp_tile, int64_t step, int64_t end, int64_t units) {
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
        unpack(t_.row, warp_tile, loaded, values);
        t_.scaled.normalise_all(values);
        valid = true;
      } else if (current >= 0) {
        valid &= subtract(current, warp_tile, loaded, values);
      }
      if (current != kNotStarted && next == kNone) {
        if (use_ == ScanUse::kSum) {
          store(warp_tile, values, __all_sync(kAllLanes, valid));
        } else {
          pick(warp_tile, values, units);
        }
        if (next_warp_tile >= end) return;
      }
      current = next;
      warp_tile = next_warp_tile;
      next = current < 0 ? t_.first_draft : records_[current].next_draft;
      if (next < 0) next_warp_tile += step;
    }
  }

  // Subtracts the draft of a record. The last one is subtracted after clipping at 0; for all kinds
  // of scan but kResidual, `combine` does that, with the values so far set aside.
  __device__ bool subtract(int32_t node, int64_t warp_tile, const Packed& loaded,
                           float (&values)[kPerLane]) const {
    const NodeRecord& r = records_[node];
    const bool last = node == t_.last_draft;
    if (last) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = fmaxf(values[j], 0.0f);
    }
    const bool apart = last && kind_ != ScanKind::kResidual;
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

  // kPerLane values of this thread: there are no registers to spare.
  static __device__ float* held() { return shared_memory<TreeShared>()->held + thread_id(); }

  // Combines Q of the last draft with the values set aside; `q` becomes the residual.
  __device__ void combine(const NodeRecord& r, int64_t warp_tile, bool valid,
                          float (&q)[kPerLane]) const {
    const float* const held = this->held();
    if (kind_ == ScanKind::kOverlaps) return store_overlaps(warp_tile, q);
    if (kind_ == ScanKind::kKSeqResidual) {
      const auto inverse = static_cast<float>(1 / t_.rho), share = r.scale;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const float p = held[j * kThreads];
        q[j] = p - share * fminf(q[j], p * inverse);
      }
      return;
    }
    uint32_t excluded = zero_excluded(t_.row.wide(), warp_tile * kWarpTile, q);
    if (use_ == ScanUse::kSum) {
      store_positive(stats_of(TreeJob::kSecond), warp_tile, q, t_.row.wide(), 1.0f,
                     __all_sync(kAllLanes, valid));
    }
    // The top tokens of rule top_k_plus_one remain in the residual.
    if (job_.p.rule != TreeRule::kMultiDraftWor) excluded = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
      q[j] = excluded >> j & 1 ? 0.0f : held[j * kThreads] - r.scale * q[j];
  }

  // Zeroes Q of a warp tile that begins with the token `begin` where tokens are excluded from the
  // last draft. Returns bits for the elements of this lane that are excluded tokens of any.
  __device__ uint32_t zero_excluded(bool wide, int64_t begin, float (&q)[kPerLane]) const {
    uint32_t all = 0, from_draft = 0;
    for (int32_t k = 0; k < t_.num_excluded; ++k) {
      const int64_t index = excluded_[k].token - begin;
      if (index < 0 || index >= kWarpTile) continue;
      const auto i = static_cast<int>(index);
      if (holder(wide, i) != lane_id()) continue;
      const uint32_t bit = 1u << element(wide, i);
      all |= bit;
      if (excluded_from_last(k)) from_draft |= bit;
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) q[j] = from_draft >> j & 1 ? 0.0f : q[j];
    return all;
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
      if (lane_id() == 0) stats_of(TreeJob::kOverlap + i).units[warp_tile] = units;
    }
  }

  __device__ void store(int64_t warp_tile, const float (&values)[kPerLane], bool valid) const {
    if (job_.p.rule == TreeRule::kTraversal) {
      store_positive(stats_of(TreeJob::kSecond), warp_tile, values, t_.row.wide(), -1.0f, true);
    }
    store_positive(stats_of(TreeJob::kPositive), warp_tile, values, t_.row.wide(), 1.0f, valid);
  }

  // Takes the value at the child's token, or the token where the running mass passes `units`.
  __device__ void pick(int64_t warp_tile, float (&values)[kPerLane], int64_t units) {
    if (use_ == ScanUse::kRead) {
      const auto index = static_cast<int>(t_.x - warp_tile * kWarpTile);
      const int mine = element(t_.row.wide(), index);
      float value = 0;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) value = j == mine ? values[j] : value;
      value = __shfl_sync(kAllLanes, value, holder(t_.row.wide(), index));
      if (thread_id() == 0) t_.residual_at_x = fmaxf(value, 0.0f);
      return;
    }
    scale_down(values, stats_of(TreeJob::kPositive).maxima[warp_tile]);
    picked_ = warp_tile_pick(values, t_.row.wide(), units);
  }

  // Sums Q over the columns that no target token has, without the excluded tokens there.
  __device__ void sum_columns_beyond() const {
    if (t_.last_draft < 0) return;
    const DraftDistribution& d = records_[t_.last_draft].draft;
    sum_beyond(warp_id(), kWarps, d, t_.row.vocab, stats_of(TreeJob::kBeyond),
               [&](int64_t first, bool wide, float (&values)[kPerLane]) {
                 if (d.columns == nullptr) zero_excluded(wide, first, values);
               });
  }

  // Whether excluded token k is excluded from the draft subtracted last.
  __device__ bool excluded_from_last(int32_t k) const {
    return same_draft_row(job_.p, q_.b, excluded_[k].node, t_.last_draft);
  }

  struct Exclusion {
    bool any, from_draft;  // of the last draft
  };
  __device__ Exclusion exclusion_of(int64_t id) const {
    Exclusion out = {};
    for (int32_t k = 0; k < t_.num_excluded; ++k) {
      if (excluded_[k].token != id) continue;
      out.any = true;
      out.from_draft |= excluded_from_last(k);
    }
    return out;
  }

  // `whole`: rows were read whole, not at survivors. `reads`: at least the last draft was.
  __device__ void add_up(bool whole, bool reads) {
    const int64_t warp_tiles = t_.row.warp_tiles();
    if (kind_ == ScanKind::kOverlaps && whole) {
#pragma unroll 1
      for (int i = 0; i < kFactorsAtOnce; ++i) {
        const TileStats tile_stats = stats_of(TreeJob::kOverlap + i);
        int64_t units = 0;
        for (int64_t s = thread_id(); s < warp_tiles; s += kThreads) units += tile_stats.units[s];
        units = block_.sum(units);
        if (thread_id() == 0) t_.overlaps[i] = fmin(1.0, static_cast<double>(units) / kUnit);
      }
    }
    const DraftDistribution* const last =
        t_.last_draft >= 0 ? &records_[t_.last_draft].draft : nullptr;
    const int64_t stored = last != nullptr && reads ? tiles_beyond(*last, t_.row.vocab) : 0;
    double positive = 0, second = 0, beyond = 0;
#pragma unroll 1
    for (int which = TreeJob::kPositive; which <= TreeJob::kBeyond; ++which) {
      if (which == TreeJob::kPositive && !whole) continue;
      if (which == TreeJob::kSecond &&
          (whole ? !excludes() && job_.p.rule != TreeRule::kTraversal : !reads)) {
        continue;
      }
      if (which == TreeJob::kBeyond && stored == 0) continue;
      const double sum =
          stored_sum(block_, stats_of(which), which == TreeJob::kBeyond ? stored : warp_tiles);
      if (which == TreeJob::kPositive) positive = sum;
      if (which == TreeJob::kSecond) second = sum;
      if (which == TreeJob::kBeyond) beyond = sum;
    }
    if (last != nullptr) {
      beyond = mass_beyond(block_, *last, t_.row.vocab, beyond,
                           [&](int64_t id) { return exclusion_of(id).from_draft; });
    }
    if (thread_id() != 0) return;
    t_.drafts_valid = positive >= 0 && second >= 0 && beyond >= 0;
    t_.positive_sum = positive;
    t_.second_sum = second + (excludes() ? 1.0 : t_.residual_mass) * beyond;
  }

  ThreadBlock block_;
  const TreeJob& job_;
  const TreeSequence& q_;
  TreeStep& t_;
  NodeRecord* const records_;
  const ExcludedToken* const excluded_;
  const ScanKind kind_;
  const ScanUse use_;
  int64_t picked_ = 0;
};

// Called and not inlined, as are the others that a verifier needs at several places: a copy at each
// would make the kernel many times as large, and its compilation as long.
inline SPECDEC_NOINLINE __device__ int64_t scan(const TreeJob& job, ScanKind kind, ScanUse use,
                                                double u) {
  __syncthreads();
  return ResidualScan(job, *shared_memory<TreeShared>(), kind, use).run(u);
}

}  // namespace specdec::cuda
