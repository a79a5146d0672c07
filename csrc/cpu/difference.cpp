#include "cpu/difference.h"

#include <algorithm>
#include <cmath>

namespace specdec {

void target_weights(const RowView& row, const Law& law, int64_t t, double c, float* out) {
  const int64_t n = row.tile_size(t);
  const float* tile = row.tile(t, out);
  if (!law.direct) {
    Shape shape = law.shape();
    shape.scale = static_cast<float>(shape.scale * c);
    tile_kernels().weights(tile, n, shape, out);
    return;
  }
  for (int64_t j = 0; j < n; ++j) out[j] = static_cast<float>(c * tile[j]);
}

bool Pair::residual(int64_t t, float* out, float* less) const {
  const int64_t n = row.tile_size(t);
  float q[kTile];
  if (!draft.weights(t * kTile, n, q)) return false;
  if (lenience != 1) {
    for (int64_t j = 0; j < n; ++j) q[j] *= lenience;
  }
  target_weights(row, law, t, c, out);
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
  d.more = d.less = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    d.more += static_cast<double>(d.sums[t]);
    d.less += static_cast<double>(d.rest[t]);
  }
  double beyond = 0;
  d.lawful = pair.draft.rest(pair.row.vocab(), beyond) && !std::isnan(d.less);
  d.less += beyond;
}

int64_t draw_among(const Pair& pair, const Survivors& s, double uniform) {
  const TileKernels& k = tile_kernels();
  float p[kTile], q[kTile];
  Shape shape = pair.law.shape();
  shape.scale = static_cast<float>(shape.scale * pair.c);
  k.weights(s.values, s.count, shape, p);
  pair.draft.weights_of(s.ids, s.count, q);
  for (int64_t j = 0; j < s.count; ++j) q[j] *= pair.lenience;
  k.subtract(p, q, s.count);
  const double total = k.sum(p, s.count);
  return total > 0 ? s.ids[k.pick(p, s.count, 0, uniform * total)] : -1;
}

void look_up(const Pair& pair, Difference& d) {
  const DraftLaw& draft = pair.draft;
  d.lawful = true;
  d.more = d.less = 0;
  double outside = 1;
  const auto add = [&](int64_t token, double q) {
    const bool known = token < pair.row.vocab();
    const double p = known ? std::exp(pair.law.logprob(pair.row, token)) : 0;
    outside -= p;
    (pair.c * p > q ? d.more : d.less) += std::abs(pair.c * p - q);
  };
  if (draft.form == DraftForm::kPointMass) {
    add(draft.token, 1);
  } else {
    for (int64_t k = 0; k < draft.row.vocab(); ++k) {
      bool again = draft.id(k) < 0;
      for (int64_t j = 0; j < k && !again; ++j) again = draft.id(j) == draft.id(k);
      if (!again) add(draft.id(k), draft.mass(draft.id(k)));
    }
  }
  d.more += pair.c * std::max(0.0, outside);
}

}  // namespace specdec
