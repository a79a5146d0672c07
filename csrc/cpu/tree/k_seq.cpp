#include "cpu/tree/k_seq.h"

#include <algorithm>
#include <cmath>

#include "specdec/acceptance.h"

namespace specdec::cpu {
namespace {

bool lossless(float t, double beta, int64_t siblings) {
  return static_cast<double>(t) * sibling_share(beta, siblings) <= 1;
}

// The largest t in [low, high] at which `beta(t)` is lossless.
template <class F>
float last_lossless(double low, double high, int64_t siblings, F&& beta) {
  for (int i = 0; i < 40; ++i) {
    const double t = (low + high) / 2;
    (t * sibling_share(beta(t), siblings) <= 1 ? low : high) = t;
  }
  return static_cast<float>(low);
}

}  // namespace

bool KSeq::load(int64_t t, float* p, float* q) const {
  if (survivors_ != nullptr) {
    survivor_weights(stats_, *survivors_, 1.0, p);
    draft_.weights_of(survivors_->ids, survivors_->count, q);
    return true;
  }
  target_weights(row_, stats_, t, 1.0, p);
  return draft_.weights(t * kTile, row_.tile_size(t), q);
}

bool KSeq::measure(Overlaps* at, int64_t count) {
  const TileKernels& k = tile_kernels();
  const int64_t tiles = survivors_ != nullptr ? 1 : row_.tiles();
  std::vector<Overlap>& overlaps = scratch_.overlaps;  // [tiles, count]
  overlaps.resize(tiles * count);
  parallel_(tiles, [&](int64_t begin, int64_t end) {
    float p[kTile], q[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const int64_t n = survivors_ != nullptr ? survivors_->count : row_.tile_size(t);
      const bool valid = load(t, p, q);
      for (int64_t i = 0; i < count; ++i) {
        overlaps[t * count + i] = valid ? k.overlap(p, q, n, at[i].t) : Overlap{NAN, NAN};
      }
    }
  });
  bool valid = true;
  for (int64_t i = 0; i < count; ++i) {
    at[i].beta = at[i].slope = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      at[i].beta += static_cast<double>(overlaps[t * count + i].sum);
      at[i].slope += static_cast<double>(overlaps[t * count + i].slope);
    }
    valid = valid && !std::isnan(at[i].beta);
  }
  return valid;
}

// beta is concave: the tangents at both ends lie above it and the chord below it. Solving for these
// instead of beta therefore brackets the largest lossless t.
void KSeq::narrow(Overlaps& low, Overlaps& high, int64_t siblings) {
  constexpr double kMargin = 2e-7;  // around a bracket, so that the next pass can confirm it
  const auto above = [&](double t) {
    return std::min(high.beta + high.slope * (t - high.t), low.beta + low.slope * (t - low.t));
  };
  const auto below = [&](double t) {
    return low.beta + (high.beta - low.beta) * ((t - low.t) / (high.t - low.t));
  };
  const double first = last_lossless(low.t, high.t, siblings, below) * (1 - kMargin);
  const double last = last_lossless(low.t, high.t, siblings, above) * (1 + kMargin);
  Overlaps at[3] = {{static_cast<float>(first)}, {0}, {static_cast<float>(last)}};
  at[1].t = (at[0].t + at[2].t) / 2;
  measure(at, 3);
  for (const Overlaps& a : at) {
    if (a.t > low.t && a.t < high.t) (lossless(a.t, a.beta, siblings) ? low : high) = a;
  }
}

bool KSeq::solve(int64_t siblings) {
  constexpr float kClose = 8e-7f;
  // Rounded down: the rule is lossless at rho = K and above, whatever P and Q are.
  const float least = std::nextafter(1.0f / static_cast<float>(siblings), 0.0f);
  Overlaps ends[2] = {{1.0f}, {siblings > 1 ? least : 1.0f}};
  double mass_beyond = 0;
  const bool valid = survivors_ == nullptr || draft_.whole_row_valid(parallel_);
  if (!valid || !measure(ends, 2) || !draft_.add_mass_beyond(row_.vocab(), mass_beyond))
    return false;
  draft_.row_checked = true;
  Overlaps high = ends[0], low = ends[1];
  if (lossless(high.t, high.beta, siblings)) low = high;
  for (int i = 0; i < 30 && high.t - low.t > kClose * high.t; ++i) narrow(low, high, siblings);
  inverse_rho_ = low.t;
  share_ = static_cast<float>(sibling_share(low.beta, siblings));
  return true;
}

void KSeq::residual(const float* p, const float* q, int64_t n, float* out) const {
  for (int64_t j = 0; j < n; ++j) {
    out[j] = std::max(p[j] - share_ * std::min(q[j], inverse_rho_ * p[j]), 0.0f);
  }
}

int64_t KSeq::draw(double uniform) {
  const TileKernels& k = tile_kernels();
  if (survivors_ != nullptr) {
    float p[kTile], q[kTile];
    load(0, p, q);
    residual(p, q, survivors_->count, p);
    const double mass = k.sum(p, survivors_->count);
    return mass > 0 ? survivors_->ids[k.pick(p, survivors_->count, 0, uniform * mass)] : -1;
  }
  std::vector<float>& sums = scratch_.positive;
  sums.resize(row_.tiles());
  const auto fill = [&](int64_t t, float* out) {
    float q[kTile];
    load(t, out, q);
    residual(out, q, row_.tile_size(t), out);
  };
  parallel_(row_.tiles(), [&](int64_t begin, int64_t end) {
    float weights[kTile];
    for (int64_t t = begin; t < end; ++t) {
      fill(t, weights);
      sums[t] = k.sum(weights, row_.tile_size(t));
    }
  });
  return cpu::draw(row_, sums, uniform, fill);
}

}  // namespace specdec::cpu
