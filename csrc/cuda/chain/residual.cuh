#pragma once
// The row that a token is drawn from after a rejection, beside the row of the draft that was
// rejected: max(cP - lQ, 0). Blocks that share it sum it by warp tile, and the last one draws. A
// direct row is read in the same way, also to draw from P.
#include "cuda/chain/decide.cuh"

namespace specdec::cuda {

constexpr int kDecideBlocks = 3;  // that run at once on a multiprocessor

// In shared memory.
struct Residual {
  RowView row;
  RowStats stats;  // of the target
  DraftDistribution draft;
  ScaledTarget scaled;
  ResidualRows rows;
  TileStats sums[ChainJob::kSums];
  float lenience;
  bool direct;
  bool subtracts;   // the draft; else P is read alone
  bool loops;       // the loop over whole warp tiles serves these rows
  bool both;        // rule block: also what Q exceeds cP by
  bool only_draft;  // reads the draft row, to learn whether it is valid

  // Whether Q is 0 at all but a few tokens, so that its sums need P there alone. Then no sums are
  // kept to draw from.
  __device__ bool few() const { return draft.lists_tokens() && !direct; }
};

// Opens target row i and its draft; `step` is from one warp tile of a warp to its next one. For one
// thread.
inline __device__ void prepare(const ChainJob& job, const ChainSequence& s, int64_t i, double c,
                               bool subtracts, int step, Residual& r) {
  const ChainParams& p = job.p;
  const RowSummary target = target_of(job, s, i);
  r.row = target_row(p, s, i);
  r.stats = target.stats;
  r.direct = s.direct;
  r.lenience = p.lenience;
  r.both = p.rule == Rule::kBlock;
  r.subtracts = subtracts;
  r.only_draft = r.loops = false;
#pragma unroll
  for (int sum = 0; sum < ChainJob::kSums; ++sum) {
    r.sums[sum] = job.sum(s.b, i, static_cast<ChainJob::Sum>(sum));
  }
  if (!subtracts) return;
  open_draft(job, s, i, p.drafted(s.b, i), r.draft);
  if (r.draft.invalid_at_token) {
    r.subtracts = false;
    return;
  }
  r.only_draft = target.listed >= 0 && !r.both;
  r.scaled = ScaledTarget(r.stats, r.direct, c);
  r.loops = !r.both && ResidualRows::serves(r.row, r.scaled, r.draft);
  r.rows = ResidualRows(r.row, r.scaled, r.draft, p.lenience, r.sums[ChainJob::kPositive],
                        r.sums[ChainJob::kDirect], step);
}

// Whether blocks must read rows before a token can be drawn.
inline __device__ bool needs_scan(const Residual& r) {
  if (r.only_draft) return !r.draft.lists_tokens() && !r.draft.row_checked;
  return r.subtracts || r.direct;
}

// The values cP - lQ of a warp tile, or P of a direct row; `target` sees the values of P before
// that. Returns false in some lane if the draft row is not valid there.
template <class Target>
inline __device__ bool read_residual(const Residual& r, int64_t warp_tile, bool subtracts,
                                     float (&values)[kPerLane], const Target& target) {
  const TileValues tile = call_read_warp_tile(r.row, warp_tile);
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) values[j] = tile.values[j];
  target(values);
  if (!subtracts) return true;
  r.scaled.normalise_all(values);
  const DraftDistribution& d = r.draft;
  const int64_t vocab = r.row.vocab;
  const bool wide = r.row.wide();
  if (d.lists_tokens()) {
    subtract_listed(d, r.lenience, vocab, wide, warp_tile, values);
    return true;
  }
  if (!d.pairs(wide)) return subtract_columns(d, r.lenience, vocab, wide, warp_tile, values);
  TileValues q = call_read_warp_tile(d.row.part(0, vocab), warp_tile);
  return subtract_entries(d, r.lenience, q.values, values);
}

// Computes the tile statistics of a direct row. Returns whether the warp tile is valid.
inline __device__ bool fill_direct(const Residual& r, int64_t warp_tile,
                                   const float (&values)[kPerLane]) {
  float top = warp_tile_max(values);
  const int64_t units = linear_units(values, r.row.wide(), top);
  if (lane_id() == 0) {
    r.sums[ChainJob::kDirect].maxima[warp_tile] = top;
    r.sums[ChainJob::kDirect].units[warp_tile] = units;
  }
  return is_finite(top);
}

__forceinline__ __device__ int sum_whole_tiles(const Residual& r, int warp_tile) {
  const auto sum = [&](auto type, auto probs) {
    return sum_residual<decltype(type)::value, decltype(probs)::value>(r.rows, warp_tile);
  };
  if (r.direct) return sum(DTypeOf<DType::kFloat32>(), std::true_type());
  return with_dtype(r.row.dtype, [&](auto type) { return sum(type, std::false_type()); });
}

// Marks the warp tiles of a draft row that are not valid.
__forceinline__ __device__ void check_draft(const Residual& r, int64_t first, int64_t step) {
  for (int64_t warp_tile = first; warp_tile < r.draft.row.warp_tiles(); warp_tile += step) {
    const TileValues tile = call_read_warp_tile(r.draft.row, warp_tile);
    const float top = warp_tile_max(tile.values);
    if (lane_id() != 0) continue;
    r.sums[ChainJob::kBeyond].maxima[warp_tile] = top < INFINITY ? 1.0f : NAN;
    r.sums[ChainJob::kBeyond].units[warp_tile] = 0;
  }
}

// Sums every step-th warp tile from `first` on.
__forceinline__ __device__ void scan(const Residual& r, int first, int step) {
  if (r.only_draft) return check_draft(r, first, step);
  const bool wide = r.row.wide();
#pragma unroll 1
  for (int warp_tile = first;; warp_tile += step) {
    if (r.loops) warp_tile = sum_whole_tiles(r, warp_tile);
    if (warp_tile >= r.row.warp_tiles()) break;
    float values[kPerLane];
    bool target_valid = true;
    const bool draft_valid = read_residual(r, warp_tile, r.subtracts, values, [&](auto& p) {
      if (r.direct) target_valid = fill_direct(r, warp_tile, p);
    });
    if (!r.subtracts) continue;
    const bool valid = __all_sync(kAllLanes, draft_valid) && target_valid;
    if (r.both) {
      store_positive(r.sums[ChainJob::kNegative], warp_tile, values, wide, -1.0f, true);
    }
    store_positive(r.sums[ChainJob::kPositive], warp_tile, values, wide, 1.0f, valid);
  }
  if (!r.subtracts) return;
  sum_beyond(first, step, r.draft, r.row.vocab, r.sums[ChainJob::kBeyond],
             [](int64_t, bool, float (&)[kPerLane]) {});
}

// What the scan has found, for the whole block.
inline __device__ BlockSums residual_sums(ThreadBlock& block, const Residual& r) {
  const int64_t tiles = r.row.warp_tiles();
  BlockSums out = {0, 0, true, true};
  if (r.only_draft) {
    out.draft_valid = r.draft.lists_tokens() || r.draft.row_checked ||
                      stored_sum(block, r.sums[ChainJob::kBeyond], r.draft.row.warp_tiles()) >= 0;
    return out;
  }
  if (r.subtracts) {
    out.positive = stored_sum(block, r.sums[ChainJob::kPositive], tiles);
    if (r.both) out.negative = stored_sum(block, r.sums[ChainJob::kNegative], tiles);
    const int64_t stored = tiles_beyond(r.draft, r.row.vocab);
    const double sum = stored > 0 ? stored_sum(block, r.sums[ChainJob::kBeyond], stored) : 0;
    const double beyond =
        mass_beyond(block, r.draft, r.row.vocab, sum, [](int64_t) { return false; });
    out.negative += beyond;
    out.draft_valid = is_finite(out.positive) && beyond >= 0;
  }
  // A residual above 0 has no entry of P that is not valid, and proves that P has mass.
  if (r.direct && !(out.positive > 0)) {
    out.target_valid = stored_sum(block, r.sums[ChainJob::kDirect], tiles) > 0;
  }
  return out;
}

inline __device__ BlockSums residual_sums_of_few(ThreadBlock& block, const Residual& r) {
  BlockSums out = {0, 0, true, true};
  sum_residual_of_few(block, r.draft, r.row, r.stats, r.scaled.c, out.positive, out.negative);
  return out;
}

// Draws from the sums of a row that was scanned: from the residual, or from P of a direct row.
inline __device__ int64_t draw_scanned(ThreadBlock& block, const Residual& r, bool residual,
                                       double u) {
  const TileStats& tile_stats = r.sums[residual ? ChainJob::kPositive : ChainJob::kDirect];
  const auto [warp_tile, rest] = choose_stored(block, tile_stats, r.row.warp_tiles(), u);
  float values[kPerLane];
  read_residual(r, warp_tile, residual, values, [](auto&) {});
  scale_down(values, tile_stats.maxima[warp_tile]);
  return warp_tile * kWarpTile + warp_tile_pick(values, r.row.wide(), rest);
}

// Draws from the residual among the survivors; -1 if none of them has any, and then the candidates
// are still the survivors.
inline __device__ int64_t draw_residual_listed(ThreadBlock& block, const Residual& r, Candidates& c,
                                               double u) {
  float scale;
  const int64_t total = weigh_listed(
      block, c,
      [&](float value, int64_t id) {
        const float p = r.scaled.weight_params.weight(value) * r.scaled.scale;
        return subtract_at(r.draft, r.lenience, id, p);
      },
      scale);
  return total > 0 ? draw_listed(c, total, r.row.vocab, u) : -1;
}

}  // namespace specdec::cuda
