#include "specdec/chain.h"

#include <algorithm>
#include <cmath>

#include "cpu/row.h"
#include "cpu/tasks.h"

namespace specdec {
namespace {

// The draft's conditional of one row. The default is the point mass on the drafted token.
struct Draft {
  bool fault = false;
  bool point = true;
  bool direct = false;  // the row holds probabilities
  RowView row;
  Shape shape{};
  double logprob = 0;  // of the drafted token
};

struct Scratches {
  Scratch target, draft;
};

class Sequence {
 public:
  Sequence(const ChainParams& p, int64_t b, const Parallel& parallel, Scratches& scratch)
      : p_(p), b_(b), parallel_(parallel), scratch_(scratch) {}

  void verify() {
    for (int64_t i = 0; i <= p_.gamma; ++i) write(i, -1, 0);
    p_.num_accepted[b_] = 0;
    params_ = params_of(p_.sampling, b_);
    p_.status[b_] = decide();
  }

 private:
  int32_t decide() {
    if (!params_.valid()) return kBadParameter;
    draft_temperature_ = params_.temperature;
    if (p_.reads_draft() && p_.draft_logsumexp != nullptr) {
      draft_temperature_ = p_.draft_temperatures ? p_.draft_temperatures[b_] : p_.draft_temperature;
      if (!(std::isfinite(draft_temperature_) && draft_temperature_ >= 0)) return kBadParameter;
    }
    if (p_.rule == Rule::kGreedy) params_ = {0.0f, 0, 1.0f, 0.0f};
    point_ = params_.temperature == 0;
    direct_ = p_.kind == Kind::kProbs && p_.rule == Rule::kToken && params_.temperature == 1 &&
              !params_.filters(p_.vocab);
    int64_t rows = p_.gamma + 1;
    if (p_.cu_rows != nullptr) {
      begin_ = std::clamp<int64_t>(p_.cu_rows[b_], 0, p_.num_rows);
      rows = std::clamp<int64_t>(p_.cu_rows[b_ + 1], begin_, p_.num_rows) - begin_;
    }
    if (rows == 0) return kTargetNotFinite;
    rows = std::min(rows, p_.gamma + 1);

    int32_t status = 0;
    for (int64_t i = 0; i < rows; ++i) {
      int64_t x = i < rows - 1 ? draft_token(i) : -1;
      if (x < -1 || x >= p_.vocab) {
        status |= kDraftOutOfRange;
        x = -1;
      }
      if (!step(i, x, status)) break;
      ++p_.num_accepted[b_];
    }
    return status;
  }

  // Judges row i; true if the drafted token x stands.
  bool step(int64_t i, int64_t x, int32_t& status) {
    const bool gather = direct_ && x >= 0;
    const RowView row = target_row(i);
    Law law;
    law.direct = direct_;
    if (gather) {
      const float at = row.at(x);
      law.finite = std::isfinite(at) && at >= 0;
    } else {
      law = measure_target(row);
    }
    if (!law.finite) {
      status |= kTargetNotFinite;
      return false;
    }
    const auto seed = static_cast<uint64_t>(p_.seeds[b_]);
    const auto position = static_cast<uint64_t>(p_.positions[b_]) + static_cast<uint64_t>(i);

    if (point_ || p_.rule == Rule::kMatch) {
      const int64_t y = race(row, law, {seed, position, kSharedStream}, parallel_);
      write(i, y, law.logprob(row, y));
      return x == y;
    }

    const double last = p_.uniforms ? p_.uniforms[b_ * (p_.gamma + 1) + p_.gamma]
                                    : uniform(seed, position, kResidualStream);
    int64_t y = -1;
    if (x < 0) {
      y = from_target(row, law, last);
    } else {
      const Draft draft = draft_law(i, x);
      const double coin = p_.uniforms ? p_.uniforms[b_ * (p_.gamma + 1) + i]
                                      : uniform(seed, position, kAcceptStream);
      if (!draft.fault && accepts(coin, row, law, draft, x)) {
        write(i, x, law.logprob(row, x));
        return true;
      }
      if (gather) {  // the row was only touched so far
        law = measure_target(row);
        if (!law.finite) {
          status |= kTargetNotFinite;
          return false;
        }
      }
      y = after_rejection(row, law, draft, x, last, status);
    }
    write(i, y, law.logprob(row, y));
    return false;
  }

  // u * Q(x) < P(x), strict. Probabilities are compared as they are: a tie is a tie. Of logits the
  // difference is, without underflow; -inf - -inf is NaN there: P = 0 is never accepted.
  static bool accepts(double coin, const RowView& row, const Law& law, const Draft& draft,
                      int64_t x) {
    if (law.direct) {
      const double q =
          draft.direct ? static_cast<double>(draft.row.at(x)) : std::exp(draft.logprob);
      return coin * q < static_cast<double>(row.at(x));
    }
    return std::log(coin) < law.logprob(row, x) - draft.logprob;
  }

  int64_t after_rejection(const RowView& row, const Law& law, const Draft& draft, int64_t x,
                          double last, int32_t& status) {
    bool finite = !draft.fault;
    if (finite) {
      const int64_t y = from_residual(row, law, draft, x, last, finite);
      if (finite && y >= 0) return y;
    }
    status |= finite ? kEmptyResidual : kDraftNotFinite;
    return from_target(row, law, last);
  }

  int64_t from_target(const RowView& row, const Law& law, double last) {
    if (!law.direct) return draw(row, law, scratch_.target, last);
    return draw(row, scratch_.target.sums, last, [&](int64_t t, float* out) {
      float buffer[kTile];
      const float* tile = row.tile(t, buffer);
      std::copy(tile, tile + row.tile_size(t), out);
    });
  }

  // norm(max(P - Q, 0)); -1 if it is empty. finite: whether the whole draft row is.
  int64_t from_residual(const RowView& row, const Law& law, const Draft& draft, int64_t x,
                        double last, bool& finite) {
    const TileKernels& k = tile_kernels();
    const Shape shape = law.direct ? Shape{} : law.shape();
    const auto fill = [&](int64_t t, float* out, float* q) {
      const int64_t n = row.tile_size(t);
      const float* tile = row.tile(t, out);
      if (law.direct) {
        if (tile != out) std::copy(tile, tile + n, out);
      } else {
        k.weights(tile, n, shape, out);
      }
      if (draft.point) {
        if (x / kTile == t) out[x % kTile] = 0;
        return Peak{0, false};
      }
      const float* d = draft.row.tile(t, q);
      if (draft.direct) {
        k.subtract(out, d, n);
        return k.is_law(d, n) ? Peak{0, false} : Peak{INFINITY, true};
      }
      const Peak peak = k.peak(d, n, nullptr);
      k.weights(d, n, draft.shape, q);
      k.subtract(out, q, n);
      return peak;
    };
    std::vector<float>& sums = scratch_.draft.sums;
    std::vector<float>& maxima = scratch_.draft.maxima;
    sums.resize(row.tiles());
    maxima.resize(row.tiles());
    parallel_(row.tiles(), [&](int64_t begin, int64_t end) {
      float out[kTile], q[kTile];
      for (int64_t t = begin; t < end; ++t) {
        const Peak peak = fill(t, out, q);
        maxima[t] = peak.nan ? NAN : peak.max;
        sums[t] = k.sum(out, row.tile_size(t));
      }
    });
    float max = -INFINITY;
    for (float m : maxima) {
      if (std::isnan(m)) finite = false;
      max = std::max(max, m);
    }
    finite = finite && std::isfinite(max);
    if (!finite) return -1;
    return draw(row, sums, last, [&](int64_t t, float* out) {
      float q[kTile];
      fill(t, out, q);
    });
  }

  Draft draft_law(int64_t i, int64_t x) {
    Draft d;
    const bool sampled = p_.draft_logsumexp != nullptr;
    const float temperature = draft_temperature_;
    if (p_.draft_form == DraftForm::kPointMass || temperature == 0) return d;
    d.point = false;
    if (p_.draft_ragged) {
      const int64_t at = begin_ - b_ + i;  // cu_rows is data: it may point anywhere
      d.fault = at < 0 || at >= p_.num_draft_rows;
      if (d.fault) return d;
      d.row = RowView(p_.draft, 0, at, p_.vocab);
    } else {
      d.row = RowView(p_.draft, b_, i, p_.vocab);
    }
    const float at = d.row.at(x);
    if (sampled) {
      const double total = p_.draft_logsumexp[b_ * p_.gamma + i];
      const float threshold = p_.draft_threshold[b_ * p_.gamma + i];
      d.fault = !std::isfinite(total) || !(at < INFINITY) || std::isnan(threshold);
      const float inv_t = inverse_temperature(temperature);
      // exp(d / T - total) about a point near the maximum, where float32 subtracts exactly.
      const auto offset = static_cast<float>(total / inv_t);
      d.shape = {offset, inv_t, threshold,
                 static_cast<float>(std::exp(static_cast<double>(offset) * inv_t - total))};
      d.logprob = at >= threshold ? static_cast<double>(at) * inv_t - total : -INFINITY;
    } else if (p_.kind == Kind::kProbs) {
      d.direct = true;
      d.fault = !(std::isfinite(at) && at >= 0);
      d.logprob = std::log(static_cast<double>(at));
    } else {
      const Law law = measure(d.row, {temperature, 0, 1.0f, 0.0f}, parallel_, scratch_.draft);
      d.fault = !law.finite;
      d.shape = law.shape();
      if (law.finite) d.logprob = law.logprob(d.row, x);
    }
    return d;
  }

  Law measure_target(const RowView& row) {
    if (p_.kind == Kind::kProbs && (direct_ || point_)) {
      const Law law = measure_direct(row);
      if (direct_ || !law.finite) return law;
    }
    return measure(row, params_, parallel_, scratch_.target);
  }

  // Probabilities as they are: tile sums, and whether every entry can be one.
  Law measure_direct(const RowView& row) {
    const TileKernels& k = tile_kernels();
    std::vector<float>& sums = scratch_.target.sums;
    sums.resize(row.tiles());
    parallel_(row.tiles(), [&](int64_t begin, int64_t end) {
      float buffer[kTile];
      for (int64_t t = begin; t < end; ++t) {
        const float* tile = row.tile(t, buffer);
        const int64_t n = row.tile_size(t);
        sums[t] = k.is_law(tile, n) ? k.sum(tile, n) : NAN;
      }
    });
    double total = 0;
    for (float s : sums) total += static_cast<double>(s);
    Law law;
    law.direct = true;
    law.finite = total > 0 && std::isfinite(total);
    return law;
  }

  RowView target_row(int64_t i) const {
    const bool as_log = p_.kind == Kind::kProbs && !direct_ && !point_;
    return p_.cu_rows != nullptr ? RowView(p_.target, 0, begin_ + i, p_.vocab, as_log)
                                 : RowView(p_.target, b_, i, p_.vocab, as_log);
  }

  int64_t draft_token(int64_t i) const {
    const int64_t at = b_ * p_.stride_token_sequence + i * p_.stride_token;
    return p_.ids_are_int64 ? static_cast<const int64_t*>(p_.draft_tokens)[at]
                            : static_cast<const int32_t*>(p_.draft_tokens)[at];
  }

  void write(int64_t i, int64_t token, double logprob) const {
    const int64_t at = b_ * (p_.gamma + 1) + i;
    if (p_.ids_are_int64) {
      static_cast<int64_t*>(p_.tokens)[at] = token;
    } else {
      static_cast<int32_t*>(p_.tokens)[at] = static_cast<int32_t>(token);
    }
    p_.logprobs[at] = static_cast<float>(logprob);
  }

  const ChainParams& p_;
  const int64_t b_;
  const Parallel& parallel_;
  Scratches& scratch_;
  Params params_{};
  float draft_temperature_ = 1;
  bool point_ = false;   // temperature 0: the law is a point mass
  bool direct_ = false;  // the target's rows are the law as they are
  int64_t begin_ = 0;    // first row of a ragged sequence
};

}  // namespace

void verify_chain_cpu(const ChainParams& p, const Parallel& parallel) {
  const int64_t work = p.batch * (p.gamma + 1) * p.vocab;
  each_sequence<Scratches>(parallel, p.batch, work,
                           [&](int64_t b, const Parallel& inner, Scratches& scratch) {
                             Sequence(p, b, inner, scratch).verify();
                           });
}

}  // namespace specdec
