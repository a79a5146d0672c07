#include "cpu/chain/residual.h"

#include <algorithm>
#include <cmath>

namespace specdec::cpu {

bool RowPair::residual_tile(int64_t t, float* positive, float* negative) const {
  const int64_t n = row.tile_size(t);
  float q[kTile];
  if (!draft.weights(t * kTile, n, q)) return false;
  if (lenience != 1) {
    for (int64_t j = 0; j < n; ++j) q[j] *= lenience;
  }
  target_weights(row, stats, t, c, positive);
  if (negative != nullptr) {
    std::copy(q, q + n, negative);
    tile_kernels().subtract(negative, positive, n);
  }
  tile_kernels().subtract(positive, q, n);
  return true;
}

void sum_residual(const RowPair& pair, bool both, const Parallel& parallel, ResidualSums& sums) {
  const TileKernels& k = tile_kernels();
  const int64_t tiles = pair.row.tiles();
  sums.positive_tiles.assign(tiles, 0.0f);
  sums.negative_tiles.assign(tiles, 0.0f);
  parallel(tiles, [&](int64_t begin, int64_t end) {
    float positive[kTile], negative[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const int64_t n = pair.row.tile_size(t);
      if (!pair.residual_tile(t, positive, both ? negative : nullptr)) {
        sums.negative_tiles[t] = NAN;
        continue;
      }
      sums.positive_tiles[t] = k.sum(positive, n);
      if (both) sums.negative_tiles[t] = k.sum(negative, n);
    }
  });
  sums.positive = total(sums.positive_tiles);
  sums.negative = total(sums.negative_tiles);
  double mass_beyond = 0;
  sums.valid =
      pair.draft.add_mass_beyond(pair.row.vocab(), mass_beyond) && !std::isnan(sums.negative);
  sums.negative += mass_beyond;
}

int64_t draw_among_survivors(const RowPair& pair, const Survivors& s, double uniform) {
  const TileKernels& k = tile_kernels();
  float p[kTile], q[kTile];
  survivor_weights(pair.stats, s, pair.c, p);
  pair.draft.weights_of(s.ids, s.count, q);
  for (int64_t j = 0; j < s.count; ++j) q[j] *= pair.lenience;
  k.subtract(p, q, s.count);
  const double total = k.sum(p, s.count);
  return total > 0 ? s.ids[k.pick(p, s.count, 0, uniform * total)] : -1;
}

void sum_residual_of_few(const RowPair& pair, ResidualSums& sums) {
  std::vector<int64_t> seen;
  sums.valid = true;
  sums.positive = sums.negative = 0;
  double elsewhere = 1;
  pair.draft.each_token([&](int64_t token) {
    if (contains(seen, token)) return;
    seen.push_back(token);
    const double q = pair.draft.form == DraftForm::kSparse ? pair.draft.mass(token) : 1;
    const bool in_target = token < pair.row.vocab();
    const double p = in_target ? std::exp(pair.stats.logprob(pair.row, token)) : 0;
    elsewhere -= p;
    (pair.c * p > q ? sums.positive : sums.negative) += std::abs(pair.c * p - q);
  });
  sums.positive += pair.c * std::max(0.0, elsewhere);
}

}  // namespace specdec::cpu
