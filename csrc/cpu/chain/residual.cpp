#include "cpu/chain/residual.h"

#include <algorithm>
#include <cmath>

namespace specdec::cpu {

bool Pair::residual(int64_t t, float* out, float* less) const {
  const int64_t n = row.tile_size(t);
  float q[kTile];
  if (!draft.weights(t * kTile, n, q)) return false;
  if (lenience != 1) {
    for (int64_t j = 0; j < n; ++j) q[j] *= lenience;
  }
  target_weights(row, stats, t, c, out);
  if (less != nullptr) {
    std::copy(q, q + n, less);
    tile_kernels().subtract(less, out, n);
  }
  tile_kernels().subtract(out, q, n);
  return true;
}

void scan(const Pair& pair, bool both, const Parallel& parallel, Difference& d) {
  const TileKernels& k = tile_kernels();
  const int64_t tiles = pair.row.tiles();
  d.sums.assign(tiles, 0.0f);
  d.rest.assign(tiles, 0.0f);
  parallel(tiles, [&](int64_t begin, int64_t end) {
    float more[kTile], less[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const int64_t n = pair.row.tile_size(t);
      if (!pair.residual(t, more, both ? less : nullptr)) {
        d.rest[t] = NAN;
        continue;
      }
      d.sums[t] = k.sum(more, n);
      if (both) d.rest[t] = k.sum(less, n);
    }
  });
  d.more = total(d.sums);
  d.less = total(d.rest);
  double beyond = 0;
  d.valid = pair.draft.rest(pair.row.vocab(), beyond) && !std::isnan(d.less);
  d.less += beyond;
}

int64_t draw_among(const Pair& pair, const Survivors& s, double uniform) {
  const TileKernels& k = tile_kernels();
  float p[kTile], q[kTile];
  survivor_weights(pair.stats, s, pair.c, p);
  pair.draft.weights_of(s.ids, s.count, q);
  for (int64_t j = 0; j < s.count; ++j) q[j] *= pair.lenience;
  k.subtract(p, q, s.count);
  const double total = k.sum(p, s.count);
  return total > 0 ? s.ids[k.pick(p, s.count, 0, uniform * total)] : -1;
}

void look_up(const Pair& pair, Difference& d) {
  std::vector<int64_t> seen;
  d.valid = true;
  d.more = d.less = 0;
  double outside = 1;
  pair.draft.each_token([&](int64_t token) {
    if (holds(seen, token)) return;
    seen.push_back(token);
    const double q = pair.draft.form == DraftForm::kSparse ? pair.draft.mass(token) : 1;
    const bool known = token < pair.row.vocab();
    const double p = known ? std::exp(pair.stats.logprob(pair.row, token)) : 0;
    outside -= p;
    (pair.c * p > q ? d.more : d.less) += std::abs(pair.c * p - q);
  });
  d.more += pair.c * std::max(0.0, outside);
}

}  // namespace specdec::cpu
