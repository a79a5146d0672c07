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

// Zeroes the entries of these tokens among the survivors, whose ids ascend.
void zero_out(const std::vector<int64_t>& tokens, const Survivors& s, float* out) {
  for (int64_t x : tokens) {
    const int32_t* end = s.ids + s.count;
    const int32_t* at = std::lower_bound(s.ids, end, x);
    if (at != end && *at == x) out[at - s.ids] = 0;
  }
}

}  // namespace

bool TriedDraft::weights(int64_t begin, int64_t n, float* out) const {
  if (!draft.weights(begin, n, out)) return false;
  zero_out(excluded, begin, n, out);
  return true;
}

double TriedDraft::at(int64_t token) const {
  if (contains(excluded, token)) return 0;
  DraftDistribution copy = draft;
  copy.look_up(token);
  return copy.q_x;
}

bool TriedDraft::sum_mass(int64_t vocab, const Parallel& parallel, std::vector<float>& sums) {
  if (!std::isnan(mass)) return true;
  if (draft.form == DraftForm::kOneHot) {
    mass = !contains(excluded, draft.token);
    return true;
  }
  if (draft.form == DraftForm::kSparse) {
    mass = 0;
    for (int64_t k = 0; k < draft.row.vocab(); ++k) {
      if (draft.id(k) >= 0 && !contains(excluded, draft.id(k))) mass += draft.row.at(k);
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
  mass = total(sums);
  if (!draft.add_mass_beyond(vocab, mass, excluded) || std::isnan(mass)) return false;
  draft.row_checked = true;
  return true;
}

double Residual::at(int64_t token) const {
  if (token >= row.vocab() || contains(excluded_, token)) return 0;
  double p = target_scale_ * std::exp(stats.logprob(row, token));
  if (stats.direct) p = target_scale_ * row.at(token);
  for (const TriedDraft& t : drafts_) {
    if (t.scale > 0) p -= t.scale * t.at(token);
  }
  return std::max(p, 0.0);
}

void Residual::exclude(TriedDraft& draft, int64_t token) {
  excluded_.push_back(token);
  draft.excluded.push_back(token);
  draft.mass = NAN;
}

void Residual::undo_exclude(TriedDraft& draft) {
  excluded_.pop_back();
  draft.excluded.pop_back();
}

Residual::Sums Residual::sums_after(TriedDraft& draft, double scale, bool with_negative) {
  scanned_ = sums_current_ = false;
  if (lookup_suffices(draft)) return sums_by_lookup(draft, scale);
  if (survivors_ == nullptr) return sums_by_scan(draft, scale, with_negative);
  Sums sums;
  sums.valid = draft.draft.whole_row_valid(*parallel_);
  if (!sums.valid) return sums;
  draft.draft.row_checked = true;
  float weights[kTile];
  sums.positive = fill_survivors(draft, scale, weights);
  return sums;
}

void Residual::subtract(TriedDraft& draft, double scale) {
  draft.scale += scale;
  last_subtracted_ = &draft;
  sums_current_ = scanned_;
}

int64_t Residual::draw(double uniform) {
  if (survivors_ != nullptr) {
    float weights[kTile];
    const double mass = fill_survivors(*last_subtracted_, 0, weights);
    if (!(mass > 0)) return -1;
    const int64_t count = survivors_->count;
    return survivors_->ids[tile_kernels().pick(weights, count, 0, uniform * mass)];
  }
  if (!sums_current_) sums_by_scan(*last_subtracted_, 0, false);
  return cpu::draw(row, scratch_->positive, uniform, [&](int64_t t, float* out) {
    fill_tile(t, *last_subtracted_, 0, out, nullptr, nullptr);
  });
}

// Each token is compared with all others, so a scan is cheaper where there are many.
bool Residual::lookup_suffices(const TriedDraft& next) const {
  constexpr int64_t kMost = 128;
  if (stats.direct) return false;
  int64_t ids = 0;
  for (const TriedDraft& t : drafts_) {
    if (t.scale == 0 && &t != &next) continue;
    if (!t.draft.lists_tokens()) return false;
    ids += t.draft.form == DraftForm::kOneHot ? 1 : t.draft.row.vocab();
  }
  return ids <= kMost;
}

// Only tokens that some draft holds lose mass. The target row sums to 1, which gives the mass of
// all others.
Residual::Sums Residual::sums_by_lookup(const TriedDraft& next, double scale) const {
  std::vector<int64_t> seen;
  Sums sums;
  double outside = 1;
  const auto add = [&](int64_t x) {
    if (contains(seen, x)) return;
    seen.push_back(x);
    const bool in_target = x < row.vocab();
    outside -= in_target ? std::exp(stats.logprob(row, x)) : 0;
    const double p = at(x), q = scale * next.at(x);
    (p > q ? sums.positive : sums.negative) += std::abs(p - q);
  };
  for (int64_t x : excluded_) add(x);
  for (const TriedDraft& t : drafts_) {
    if (t.scale == 0 && &t != &next) continue;
    t.draft.each_token(add);
  }
  sums.positive += target_scale_ * std::max(0.0, outside);
  return sums;
}

bool Residual::fill_tile(int64_t t, const TriedDraft& next, double scale, float* out,
                         float* negative, float* draft_mass) const {
  const TileKernels& k = tile_kernels();
  const int64_t begin = t * kTile, n = row.tile_size(t);
  float q[kTile];
  target_weights(row, stats, t, target_scale_, out);
  for (const TriedDraft& other : drafts_) {
    if (&other == &next || other.scale == 0) continue;
    other.weights(begin, n, q);
    scale_by(other.scale, n, q);
    k.subtract(out, q, n);
  }
  if (!next.weights(begin, n, q)) return false;
  if (draft_mass != nullptr) *draft_mass = k.sum(q, n);
  double remaining = next.scale + scale;
  if (negative != nullptr) {
    if (next.scale > 0) {
      std::copy(q, q + n, negative);
      scale_by(next.scale, n, negative);
      k.subtract(out, negative, n);
    }
    remaining = scale;
    std::copy(q, q + n, negative);
    scale_by(scale, n, negative);
    k.subtract(negative, out, n);
  }
  scale_by(remaining, n, q);
  k.subtract(out, q, n);
  zero_out(excluded_, begin, n, out);
  return true;
}

Residual::Sums Residual::sums_by_scan(TriedDraft& next, double scale, bool with_negative) {
  const TileKernels& k = tile_kernels();
  std::vector<float>&positive = scratch_->positive, &negative = scratch_->negative,
  &masses = scratch_->masses;
  const int64_t tiles = row.tiles();
  positive.assign(tiles, 0.0f);
  negative.assign(tiles, 0.0f);
  masses.assign(tiles, 0.0f);
  const bool wants_mass = std::isnan(next.mass);
  (*parallel_)(tiles, [&](int64_t begin, int64_t end) {
    float above[kTile], below[kTile];
    for (int64_t t = begin; t < end; ++t) {
      const int64_t n = row.tile_size(t);
      if (!fill_tile(t, next, scale, above, with_negative ? below : nullptr,
                     wants_mass ? &masses[t] : nullptr)) {
        negative[t] = NAN;
        continue;
      }
      positive[t] = k.sum(above, n);
      if (with_negative) negative[t] = k.sum(below, n);
    }
  });
  Sums sums;
  sums.positive = total(positive);
  sums.negative = total(negative);
  double mass_beyond = 0;  // mass of Q at columns that no token of the target has
  sums.valid = next.draft.add_mass_beyond(row.vocab(), mass_beyond, next.excluded) &&
               !std::isnan(sums.negative);
  if (!sums.valid) return sums;
  next.draft.row_checked = scanned_ = true;
  if (wants_mass) next.mass = total(masses) + mass_beyond;
  sums.negative += scale * mass_beyond;
  return sums;
}

double Residual::fill_survivors(const TriedDraft& next, double scale, float* out) const {
  const TileKernels& k = tile_kernels();
  const Survivors& s = *survivors_;
  float q[kTile];
  survivor_weights(stats, s, target_scale_, out);
  const auto subtract = [&](const TriedDraft& t, double times) {
    t.draft.weights_of(s.ids, s.count, q);
    zero_out(t.excluded, s, q);
    scale_by(times, s.count, q);
    k.subtract(out, q, s.count);
  };
  for (const TriedDraft& other : drafts_) {
    if (&other != &next && other.scale > 0) subtract(other, other.scale);
  }
  subtract(next, next.scale + scale);
  zero_out(excluded_, s, out);
  return static_cast<double>(k.sum(out, s.count));
}

}  // namespace specdec::cpu
