#include "cpu/tree/residual.h"

#include <algorithm>
#include <cmath>

namespace specdec::cpu {
namespace {

void scale_by(double scale, int64_t n, float* q) {
  const float s = static_cast<float>(scale);
  if (s == 1) return;
  for (int64_t j = 0; j < n; ++j) q[j] *= s;
}

// Zeroes what these tokens have among the survivors, whose ids ascend.
void clear(const std::vector<int64_t>& tokens, const Survivors& s, float* out) {
  for (int64_t x : tokens) {
    const int32_t* end = s.ids + s.count;
    const int32_t* at = std::lower_bound(s.ids, end, x);
    if (at != end && *at == x) out[at - s.ids] = 0;
  }
}

}  // namespace

bool Taken::weights(int64_t begin, int64_t n, float* out) const {
  if (!draft.weights(begin, n, out)) return false;
  clear(without, begin, n, out);
  return true;
}

double Taken::at(int64_t token) const {
  if (holds(without, token)) return 0;
  DraftDistribution there = draft;
  there.look_up(token);
  return there.q_x;
}

bool Taken::sum_rest(int64_t vocab, const Parallel& parallel, std::vector<float>& sums) {
  if (!std::isnan(rest)) return true;
  if (draft.form == DraftForm::kOneHot) {
    rest = !holds(without, draft.token);
    return true;
  }
  if (draft.form == DraftForm::kSparse) {
    rest = 0;
    for (int64_t k = 0; k < draft.row.vocab(); ++k) {
      if (draft.id(k) >= 0 && !holds(without, draft.id(k))) rest += draft.row.at(k);
    }
    return true;
  }
  const int64_t tiles = (vocab + kTile - 1) / kTile;
  sums.resize(tiles);
  parallel(tiles, [&](int64_t begin, int64_t end) {
    float q[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const int64_t n = std::min(kTile, vocab - t * kTile);
      sums[t] = weights(t * kTile, n, q) ? tile_kernels().sum(q, n) : NAN;
    }
  });
  rest = total(sums);
  if (!draft.rest(vocab, rest, without) || std::isnan(rest)) return false;
  draft.checked = true;
  return true;
}

double Left::at(int64_t token) const {
  if (token >= row.vocab() || holds(removed_, token)) return 0;
  double p = c_ * std::exp(stats.logprob(row, token));
  if (stats.direct) p = c_ * row.at(token);
  for (const Taken& t : taken_) {
    if (t.scale > 0) p -= t.scale * t.at(token);
  }
  return std::max(p, 0.0);
}

void Left::remove(Taken& taken, int64_t token) {
  removed_.push_back(token);
  taken.without.push_back(token);
  taken.rest = NAN;
}

void Left::restore(Taken& taken) {
  removed_.pop_back();
  taken.without.pop_back();
}

Left::Step Left::weigh(Taken& next, double scale, bool both) {
  scanned_ = summed_ = false;
  if (worth_looking_up(next)) return look_up(next, scale);
  if (listed_ == nullptr) return scan(next, scale, both);
  Step step;
  step.valid = next.draft.whole_row_valid(*parallel_);
  if (!step.valid) return step;
  next.draft.checked = true;
  float left[kTile];
  step.more = among(next, scale, left);
  return step;
}

void Left::take(Taken& taken, double scale) {
  taken.scale += scale;
  newest_ = &taken;
  summed_ = scanned_;
}

int64_t Left::draw(double uniform) {
  if (listed_ != nullptr) {
    float left[kTile];
    const double mass = among(*newest_, 0, left);
    if (!(mass > 0)) return -1;
    return listed_->ids[tile_kernels().pick(left, listed_->count, 0, uniform * mass)];
  }
  if (!summed_) scan(*newest_, 0, false);
  return cpu::draw(row, memory_->more, uniform,
                   [&](int64_t t, float* out) { tile(t, *newest_, 0, out, nullptr, nullptr); });
}

bool Left::worth_looking_up(const Taken& next) const {
  constexpr int64_t kMost = 128;
  if (stats.direct) return false;
  int64_t ids = 0;
  for (const Taken& t : taken_) {
    if (t.scale == 0 && &t != &next) continue;
    if (!t.draft.few()) return false;
    ids += t.draft.form == DraftForm::kOneHot ? 1 : t.draft.row.vocab();
  }
  return ids <= kMost;
}

// The target's row sums to 1: what no law holds a token of is left whole.
Left::Step Left::look_up(const Taken& next, double scale) const {
  std::vector<int64_t> seen;
  Step step;
  double outside = 1;
  const auto add = [&](int64_t x) {
    if (holds(seen, x)) return;
    seen.push_back(x);
    const bool known = x < row.vocab();
    outside -= known ? std::exp(stats.logprob(row, x)) : 0;
    const double left = at(x), q = scale * next.at(x);
    (left > q ? step.more : step.less) += std::abs(left - q);
  };
  for (int64_t x : removed_) add(x);
  for (const Taken& t : taken_) {
    if (t.scale == 0 && &t != &next) continue;
    t.draft.each_token(add);
  }
  step.more += c_ * std::max(0.0, outside);
  return step;
}

// One tile of what is left, also without `scale` more of the next law, which comes last. `less` and
// `mass`, the sum of the next law, may be null. False if its row is no law.
bool Left::tile(int64_t t, const Taken& next, double scale, float* out, float* less,
                float* mass) const {
  const TileKernels& k = tile_kernels();
  const int64_t begin = t * kTile, n = row.tile_size(t);
  float q[kTile];
  target_weights(row, stats, t, c_, out);
  for (const Taken& other : taken_) {
    if (&other == &next || other.scale == 0) continue;
    other.weights(begin, n, q);
    scale_by(other.scale, n, q);
    k.subtract(out, q, n);
  }
  if (!next.weights(begin, n, q)) return false;
  if (mass != nullptr) *mass = k.sum(q, n);
  double more = next.scale + scale;
  if (less != nullptr) {
    if (next.scale > 0) {
      std::copy(q, q + n, less);
      scale_by(next.scale, n, less);
      k.subtract(out, less, n);
    }
    more = scale;
    std::copy(q, q + n, less);
    scale_by(scale, n, less);
    k.subtract(less, out, n);
  }
  scale_by(more, n, q);
  k.subtract(out, q, n);
  clear(removed_, begin, n, out);
  return true;
}

Left::Step Left::scan(Taken& next, double scale, bool both) {
  const TileKernels& k = tile_kernels();
  std::vector<float>&more = memory_->more, &less = memory_->less, &mass = memory_->mass;
  const int64_t tiles = row.tiles();
  more.assign(tiles, 0.0f);
  less.assign(tiles, 0.0f);
  mass.assign(tiles, 0.0f);
  const bool rest = std::isnan(next.rest);
  (*parallel_)(tiles, [&](int64_t begin, int64_t end) {
    float left[kTile], over[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const int64_t n = row.tile_size(t);
      if (!tile(t, next, scale, left, both ? over : nullptr, rest ? &mass[t] : nullptr)) {
        less[t] = NAN;
        continue;
      }
      more[t] = k.sum(left, n);
      if (both) less[t] = k.sum(over, n);
    }
  });
  Step step;
  step.more = total(more);
  step.less = total(less);
  double beyond = 0;
  step.valid = next.draft.rest(row.vocab(), beyond, next.without) && !std::isnan(step.less);
  if (!step.valid) return step;
  next.draft.checked = scanned_ = true;
  if (rest) next.rest = total(mass) + beyond;
  step.less += scale * beyond;
  return step;
}

// The survivors of a filtered row; returns their sum.
double Left::among(const Taken& next, double scale, float* out) const {
  const TileKernels& k = tile_kernels();
  const Survivors& s = *listed_;
  float q[kTile];
  survivor_weights(stats, s, c_, out);
  const auto subtract = [&](const Taken& t, double times) {
    t.draft.weights_of(s.ids, s.count, q);
    clear(t.without, s, q);
    scale_by(times, s.count, q);
    k.subtract(out, q, s.count);
  };
  for (const Taken& other : taken_) {
    if (&other != &next && other.scale > 0) subtract(other, other.scale);
  }
  subtract(next, next.scale + scale);
  clear(removed_, s, out);
  return static_cast<double>(k.sum(out, s.count));
}

}  // namespace specdec::cpu
