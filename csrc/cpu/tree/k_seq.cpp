#include "cpu/tree/k_seq.h"

#include <algorithm>
#include <cmath>

#include "specdec/acceptance.h"

namespace specdec::cpu {
namespace {

// (1 - (1 - beta)^K) / beta, in [1, K]: how much of beta one of K siblings takes. It falls with
// beta.
double share(double beta, int64_t siblings) {
  if (siblings == 1) return 1;
  if (!(beta > 0)) return static_cast<double>(siblings);
  return any_sibling_accepted(beta, siblings) / beta;
}

bool lossless(float t, double beta, int64_t siblings) {
  return static_cast<double>(t) * share(beta, siblings) <= 1;
}

// The t in [low, high] up to which `beta(t)` is lossless.
template <class F>
float last_lossless(double low, double high, int64_t siblings, F&& beta) {
  for (int i = 0; i < 40; ++i) {
    const double t = (low + high) / 2;
    (t * share(beta(t), siblings) <= 1 ? low : high) = t;
  }
  return static_cast<float>(low);
}

}  // namespace

bool KSeq::load(int64_t t, float* p, float* q) const {
  if (listed_ != nullptr) {
    survivor_weights(law_, *listed_, 1.0, p);
    draft_.weights_of(listed_->ids, listed_->count, q);
    return true;
  }
  target_weights(row_, law_, t, 1.0, p);
  return draft_.weights(t * kTile, row_.tile_size(t), q);
}

bool KSeq::measure(Bound* at, int64_t count) {
  const TileKernels& k = tile_kernels();
  const int64_t tiles = listed_ != nullptr ? 1 : row_.tiles();
  std::vector<Overlap>& parts = memory_.overlaps;  // [tiles, count]
  parts.resize(tiles * count);
  parallel_(tiles, [&](int64_t begin, int64_t end) {
    float p[kTile], q[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const int64_t n = listed_ != nullptr ? listed_->count : row_.tile_size(t);
      const bool valid = load(t, p, q);
      for (int64_t i = 0; i < count; ++i) {
        parts[t * count + i] = valid ? k.overlap(p, q, n, at[i].t) : Overlap{NAN, NAN};
      }
    }
  });
  bool valid = true;
  for (int64_t i = 0; i < count; ++i) {
    at[i].beta = at[i].slope = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      at[i].beta += static_cast<double>(parts[t * count + i].sum);
      at[i].slope += static_cast<double>(parts[t * count + i].slope);
    }
    valid = valid && !std::isnan(at[i].beta);
  }
  return valid;
}

// beta is concave: two tangents lie above it and the chord between them below, and so do the ends
// of what is lossless.
void KSeq::narrow(Bound& low, Bound& high, int64_t siblings) {
  constexpr double kApart = 2e-7;  // about a found end, so that the next pass may confirm it
  const auto above = [&](double t) {
    return std::min(high.beta + high.slope * (t - high.t), low.beta + low.slope * (t - low.t));
  };
  const auto below = [&](double t) {
    return low.beta + (high.beta - low.beta) * ((t - low.t) / (high.t - low.t));
  };
  const double first = last_lossless(low.t, high.t, siblings, below) * (1 - kApart);
  const double last = last_lossless(low.t, high.t, siblings, above) * (1 + kApart);
  Bound at[3] = {{static_cast<float>(first)}, {0}, {static_cast<float>(last)}};
  at[1].t = (at[0].t + at[2].t) / 2;
  measure(at, 3);
  for (const Bound& a : at) {
    if (a.t > low.t && a.t < high.t) (lossless(a.t, a.beta, siblings) ? low : high) = a;
  }
}

bool KSeq::solve(int64_t siblings) {
  constexpr float kClose = 8e-7f;
  // Rounded down: at rho = K and above every law is kept.
  const float least = std::nextafter(1.0f / static_cast<float>(siblings), 0.0f);
  Bound ends[2] = {{1.0f}, {siblings > 1 ? least : 1.0f}};
  double beyond = 0;
  const bool valid = listed_ == nullptr || draft_.whole_row_valid(parallel_);
  if (!valid || !measure(ends, 2) || !draft_.rest(row_.vocab(), beyond)) return false;
  draft_.checked = true;
  Bound high = ends[0], low = ends[1];
  if (lossless(high.t, high.beta, siblings)) low = high;
  for (int i = 0; i < 30 && high.t - low.t > kClose * high.t; ++i) narrow(low, high, siblings);
  inverse_ = low.t;
  taken_ = low.beta > 0 ? static_cast<float>(share(low.beta, siblings)) : 0.0f;
  return true;
}

void KSeq::left(const float* p, const float* q, int64_t n, float* out) const {
  for (int64_t j = 0; j < n; ++j) {
    out[j] = std::max(p[j] - taken_ * std::min(q[j], inverse_ * p[j]), 0.0f);
  }
}

int64_t KSeq::draw(double uniform) {
  const TileKernels& k = tile_kernels();
  if (listed_ != nullptr) {
    float p[kTile], q[kTile];
    load(0, p, q);
    left(p, q, listed_->count, p);
    const double mass = k.sum(p, listed_->count);
    return mass > 0 ? listed_->ids[k.pick(p, listed_->count, 0, uniform * mass)] : -1;
  }
  std::vector<float>& sums = memory_.more;
  sums.resize(row_.tiles());
  const auto fill = [&](int64_t t, float* out) {
    float q[kTile];
    load(t, out, q);
    left(out, q, row_.tile_size(t), out);
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
