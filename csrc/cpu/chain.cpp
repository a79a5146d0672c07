#include "specdec/chain.h"

#include <algorithm>
#include <cmath>

#include "cpu/draft.h"
#include "cpu/tasks.h"

namespace specdec {
namespace {

struct Scratches {
  Scratch target, draft;
  std::vector<float> more, less;  // [tiles]: sums of max(cP - lQ, 0) and max(lQ - cP, 0)
  // Of rule block, one a judged draft.
  std::vector<Law> laws;
  std::vector<DraftLaw> drafts;
  std::vector<double> log_c;  // one more
};

// The two one-sided differences of c * P and l * Q over one row.
struct Difference {
  bool lawful = true;
  double more = 0, less = 0;
};

// Verdict on one sequence.
class Sequence {
 public:
  Sequence(const ChainParams& p, int64_t b, const Parallel& parallel, Scratches& scratch)
      : p_(p), b_(b), parallel_(parallel), scratch_(scratch) {}

  void verify() {
    for (int64_t i = 0; i <= p_.gamma; ++i) write(i, -1, 0);
    for (int64_t i = 0; i < p_.gamma; ++i) chance(i, NAN);
    p_.num_accepted[b_] = 0;
    params_ = params_of(p_.sampling, b_);
    decide();
    p_.status[b_] = status_;
  }

 private:
  void decide() {
    q_temperature_ = params_.temperature;
    if (p_.reads_draft() && p_.draft_form == DraftForm::kSampled) {
      q_temperature_ = p_.draft_temperatures ? p_.draft_temperatures[b_] : p_.draft_temperature;
    }
    if (!params_.valid() || !(std::isfinite(q_temperature_) && q_temperature_ >= 0)) {
      status_ = kBadParameter;
      return;
    }
    if (p_.rule == Rule::kGreedy) params_ = {0.0f, 0, 1.0f, 0.0f};
    point_ = params_.temperature == 0;
    direct_ = p_.kind == Kind::kProbs && p_.reads_draft() && params_.temperature == 1 &&
              !params_.filters(p_.vocab);
    int64_t rows = p_.gamma + 1;
    if (p_.cu_rows != nullptr) {
      begin_ = std::clamp<int64_t>(p_.cu_rows[b_], 0, p_.num_rows);
      rows = std::clamp<int64_t>(p_.cu_rows[b_ + 1], begin_, p_.num_rows) - begin_;
    }
    if (rows == 0) {
      status_ = kTargetNotFinite;
      return;
    }
    limit(std::min(rows, p_.gamma + 1));
    if (p_.rule == Rule::kBlock && !point_) {
      block();
    } else {
      walk();
    }
  }

  // How many drafts are judged, and whether nothing follows when all of them stand: nothing follows
  // an end-of-sequence token or the last token that may be emitted.
  void limit(int64_t rows) {
    const int64_t most = p_.max_emit != nullptr ? std::max<int64_t>(0, p_.max_emit[b_]) : rows;
    cut_ = most == 0;
    while (drafts_ < rows - 1 && !cut_) {
      const int64_t x = draft_token(drafts_);
      if (x == -1) return;
      if (x < 0 || x >= p_.id_limit()) {
        status_ |= kDraftOutOfRange;
        return;
      }
      ++drafts_;
      cut_ = drafts_ == most || std::count(p_.eos_ids, p_.eos_ids + p_.num_eos, x) > 0;
    }
  }

  // Every rule that judges its drafts from the first one on.
  void walk() {
    for (int64_t i = 0; i < drafts_ || (i == drafts_ && !cut_); ++i) {
      if (!step(i, i < drafts_ ? draft_token(i) : -1)) return;
      ++p_.num_accepted[b_];
    }
  }

  // Judges row i; true if the drafted token x stands.
  bool step(int64_t i, int64_t x) {
    const RowView row = target_row(i);
    const bool gather = direct_ && x >= 0;
    Law law = gather ? look_up(row, x) : measure_target(row);
    if (!law.finite) {
      status_ |= kTargetNotFinite;
      return false;
    }
    if (point_ || p_.rule == Rule::kMatch) return compare(i, x, row, law);
    if (x < 0) return emit_from_target(i, row, law);

    DraftLaw draft;
    const bool ratio = p_.reads_draft();
    if (ratio) draft = draft_of(i, x);
    if (ratio ? accepts(i, x, row, law, draft) : likely(i, x, row, law)) {
      write(i, x, law.logprob(row, x));
      return true;
    }
    if (gather) {  // the row was only touched so far
      law = measure_target(row);
      if (!law.finite) {
        status_ |= kTargetNotFinite;
        return false;
      }
    }
    return ratio ? emit_residual(i, row, law, draft, 1.0) : emit_from_target(i, row, law);
  }

  // The target says y, by its maximum or by shared noise.
  bool compare(int64_t i, int64_t x, const RowView& row, const Law& law) {
    const RaceNoise noise = {seed(), position(i), kSharedStream};
    const int64_t y = race(row, law, noise, parallel_);
    bool stands = x == y;
    if (p_.rule == Rule::kLenient && x >= 0 && x < p_.vocab) {
      // P(x) >= lenience * max P at temperature 1; the row holds what was given.
      const double at = row.at(x), top = law.max, l = p_.lenience;
      stands |= p_.kind == Kind::kProbs ? at >= l * top : at - top >= std::log(l);
    }
    if (x >= 0) chance(i, stands);
    write(i, stands ? x : y, point_ ? 0.0 : law.logprob(row, y));
    return stands;
  }

  // u * l * Q(x) < P(x), strict. Probabilities are compared as they are: a tie is a tie. Of logits
  // the difference is, without underflow; -inf - -inf is NaN there: P = 0 is never accepted.
  bool accepts(int64_t i, int64_t x, const RowView& row, const Law& law, const DraftLaw& draft) {
    if (draft.fault) return false;
    const double u = coin(i);
    if (law.direct) {
      const double p_x = x < p_.vocab ? row.at(x) : 0.0f, q_x = p_.lenience * draft.q_x;
      chance(i, p_x == 0 ? 0 : p_x / q_x);
      return u * q_x < p_x;
    }
    const double log_p = x < p_.vocab ? law.logprob(row, x) : -INFINITY;
    const double log_q = std::log(static_cast<double>(p_.lenience)) + draft.log_q_x;
    chance(i, log_p == -INFINITY ? 0 : std::exp(std::min(0.0, log_p - log_q)));
    return std::log(u) < log_p - log_q;
  }

  // The rules that ask the target alone, or nobody.
  bool likely(int64_t i, int64_t x, const RowView& row, const Law& law) {
    if (p_.rule == Rule::kSynthetic) {
      const float rate = p_.synthetic_rates[i];
      chance(i, std::isnan(rate) ? NAN : std::max(rate, 0.0f));
      return coin(i) < rate;
    }
    const double p_x = std::exp(law.logprob(row, x)), epsilon = p_.typical_epsilon;
    // The smaller bound needs the entropy, which is a pass over the row.
    const bool stands =
        p_x > epsilon || (p_x > 0 && p_x > p_.typical_delta * std::exp(-entropy(row, law)));
    chance(i, stands);
    return stands;
  }

  // Rule block (Sun et al. 2024): the last i with u < h_i, from the end; only the rows that it
  // passes are scanned. A faulty row ends the block before it, as if nothing had been drafted from
  // there on.
  void block() {
    auto& [target, draft, more, less, laws, drafts, log_c] = scratch_;
    laws.clear();
    drafts.clear();
    log_c.assign(1, 0.0);
    int64_t end = drafts_;
    int32_t fault = 0;
    for (int64_t i = 0; i < drafts_; ++i) {
      const int64_t x = draft_token(i);
      const RowView row = target_row(i);
      laws.push_back(direct_ ? look_up(row, x) : measure_target(row));
      fault = laws[i].finite ? 0 : kTargetNotFinite;
      if (fault == 0) {
        drafts.push_back(draft_of(i, x));
        fault = drafts[i].fault ? kDraftNotFinite : 0;
      }
      if (fault != 0) {
        end = i;
        break;
      }
      const double log_p = x < p_.vocab ? laws[i].logprob(row, x) : -INFINITY;
      const double c = log_c[i] + log_p;  // -inf stays, whatever Q is
      log_c.push_back(c == -INFINITY ? c : std::min(0.0, c - drafts[i].log_q_x));
    }

    int64_t tau = end;
    for (; tau > 0; --tau) {
      const double c = std::exp(log_c[tau]);
      double h = c;
      if (tau < end) {
        if (direct_) laws[tau] = measure_target(target_row(tau));
        fault = laws[tau].finite ? 0 : kTargetNotFinite;
        Difference d;
        if (fault == 0) {
          d = block_difference(tau, c);
          fault = d.lawful ? 0 : kDraftNotFinite;
        }
        if (fault != 0) {
          end = tau;
        } else {
          h = d.less > 0 ? std::min(1.0, d.more / d.less) : c;
        }
      }
      chance(tau - 1, h);
      if (coin(tau - 1) < h) break;
    }
    p_.num_accepted[b_] = static_cast<int32_t>(tau);
    for (int64_t i = 0; i < tau; ++i) {
      const RowView row = target_row(i);
      const int64_t x = draft_token(i);
      write(i, x, laws[i].direct ? std::log(row.at(x)) : laws[i].logprob(row, x));
    }
    if (tau == end && ((cut_ && fault == 0) || fault == kTargetNotFinite)) {
      status_ |= fault;
      return;
    }
    follow(tau, tau == end, fault);
  }

  // The token after a block of tau drafts.
  void follow(int64_t tau, bool whole, int32_t fault) {
    const RowView row = target_row(tau);
    const bool known = !whole && !(direct_ && tau == 0);  // that row was only touched so far
    const Law law = known ? scratch_.laws[tau] : measure_target(row);
    if (!law.finite) {
      status_ |= kTargetNotFinite;
    } else if (whole) {
      status_ |= fault;
      emit_from_target(tau, row, law);
    } else {
      emit_residual(tau, row, law, scratch_.drafts[tau], std::exp(scratch_.log_c[tau]));
    }
  }

  Difference block_difference(int64_t tau, double c) {
    const DraftLaw& draft = scratch_.drafts[tau];
    const Law& law = scratch_.laws[tau];
    const RowView row = target_row(tau);
    if (!draft.few() || direct_) return difference(row, law, draft, c);
    Difference d;
    double outside = 1;
    const auto add = [&](int64_t token, double q) {
      const double p = token < p_.vocab ? std::exp(law.logprob(row, token)) : 0;
      outside -= p;
      (c * p > q ? d.more : d.less) += std::abs(c * p - q);
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
    d.more += c * std::max(0.0, outside);
    return d;
  }

  // c * P of one tile.
  void target_weights(const RowView& row, const Law& law, int64_t t, double c, float* out) const {
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

  bool draft_weights(const RowView& row, const DraftLaw& draft, int64_t t, float* out) const {
    const int64_t n = row.tile_size(t);
    if (!draft.weights(t * kTile, n, out)) return false;
    if (p_.lenience != 1) {
      for (int64_t j = 0; j < n; ++j) out[j] *= p_.lenience;
    }
    return true;
  }

  // Leaves the tiles' sums of max(cP - lQ, 0) in scratch.more.
  Difference difference(const RowView& row, const Law& law, const DraftLaw& draft, double c) {
    const TileKernels& k = tile_kernels();
    const int64_t tiles = row.tiles();
    std::vector<float>& more = scratch_.more;
    std::vector<float>& less = scratch_.less;
    more.resize(tiles);
    less.resize(tiles);
    const bool both = p_.rule == Rule::kBlock;
    parallel_(tiles, [&](int64_t begin, int64_t end) {
      float p[kTile], q[kTile], rest[kTile];
      for (int64_t t = begin; t < end; ++t) {
        const int64_t n = row.tile_size(t);
        less[t] = 0;
        if (!draft_weights(row, draft, t, q)) {
          less[t] = NAN;
          continue;
        }
        target_weights(row, law, t, c, p);
        if (both) {
          std::copy(q, q + n, rest);
          k.subtract(rest, p, n);
          less[t] = k.sum(rest, n);
        }
        k.subtract(p, q, n);
        more[t] = k.sum(p, n);
      }
    });
    Difference d;
    for (int64_t t = 0; t < tiles; ++t) {
      d.less += static_cast<double>(less[t]);
      if (!std::isnan(less[t])) d.more += static_cast<double>(more[t]);
    }
    d.lawful = draft.rest(p_.vocab, d.less) && !std::isnan(d.less);
    return d;
  }

  // Y ~ norm(max(cP - lQ, 0)), or ~ P where there is nothing to subtract or nothing left.
  bool emit_residual(int64_t i, const RowView& row, const Law& law, const DraftLaw& draft,
                     double c) {
    Difference d;
    d.lawful = !draft.fault;
    if (d.lawful) d = difference(row, law, draft, c);
    if (!d.lawful || !(d.more > 0)) {
      status_ |= d.lawful ? kEmptyResidual : kDraftNotFinite;
      if (p_.rule == Rule::kBlock) measure_target(row);  // its tile sums are another row's by now
      return emit_from_target(i, row, law);
    }
    const int64_t y = draw(row, scratch_.more, last(i), [&](int64_t t, float* out) {
      float q[kTile];
      draft_weights(row, draft, t, q);
      target_weights(row, law, t, c, out);
      tile_kernels().subtract(out, q, row.tile_size(t));
    });
    write(i, y, law.logprob(row, y));
    return false;
  }

  bool emit_from_target(int64_t i, const RowView& row, const Law& law) {
    const std::vector<float>& sums = scratch_.target.sums;
    const int64_t y =
        law.direct ? draw(row, sums, last(i),
                          [&](int64_t t, float* out) { target_weights(row, law, t, 1.0, out); })
                   : draw(row, law, scratch_.target, last(i));
    write(i, y, law.logprob(row, y));
    return false;
  }

  // H = -sum P log P over the survivors.
  double entropy(const RowView& row, const Law& law) {
    const Shape shape = law.shape();
    std::vector<float>& sums = scratch_.more;
    sums.resize(row.tiles());
    parallel_(row.tiles(), [&](int64_t begin, int64_t end) {
      float buffer[kTile], p[kTile];
      for (int64_t t = begin; t < end; ++t) {
        const float* tile = row.tile(t, buffer);
        const int64_t n = row.tile_size(t);
        tile_kernels().weights(tile, n, shape, p);
        for (int64_t j = 0; j < n; ++j) p[j] = p[j] > 0 ? p[j] * (tile[j] - law.max) : 0;
        sums[t] = tile_kernels().sum(p, n);
      }
    });
    double sum = 0;
    for (float s : sums) sum += static_cast<double>(s);
    return law.log_sum - sum * law.inv_t;
  }

  DraftLaw draft_of(int64_t i, int64_t x) {
    return draft_law(p_, b_, i, begin_, x, q_temperature_, parallel_, scratch_.draft);
  }

  // A row that holds the law is judged at the drafted token alone.
  Law look_up(const RowView& row, int64_t x) const {
    Law law;
    law.direct = true;
    const float at = x < p_.vocab ? row.at(x) : 0;
    law.finite = std::isfinite(at) && at >= 0;
    return law;
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

  uint64_t seed() const { return static_cast<uint64_t>(p_.seeds[b_]); }
  uint64_t position(int64_t i) const {
    return static_cast<uint64_t>(p_.positions[b_]) + static_cast<uint64_t>(i);
  }
  double coin(int64_t i) const {
    return p_.uniforms != nullptr ? p_.uniforms[b_ * (p_.gamma + 1) + i]
                                  : uniform(seed(), position(i), kAcceptStream);
  }
  double last(int64_t i) const {
    return p_.uniforms != nullptr ? p_.uniforms[b_ * (p_.gamma + 1) + p_.gamma]
                                  : uniform(seed(), position(i), kResidualStream);
  }

  void write(int64_t i, int64_t token, double logprob) const {
    const int64_t at = b_ * (p_.gamma + 1) + i;
    if (p_.ids_are_int64) {
      static_cast<int64_t*>(p_.tokens)[at] = token;
    } else {
      static_cast<int32_t*>(p_.tokens)[at] = static_cast<int32_t>(token);
    }
    if (p_.logprobs != nullptr) p_.logprobs[at] = static_cast<float>(logprob);
  }

  // The probability with which draft i was to stand.
  void chance(int64_t i, double probability) const {
    if (p_.acceptance == nullptr) return;
    p_.acceptance[b_ * p_.gamma + i] = static_cast<float>(probability > 1 ? 1.0 : probability);
  }

  const ChainParams& p_;
  const int64_t b_;
  const Parallel& parallel_;
  Scratches& scratch_;
  Params params_{};
  float q_temperature_ = 1;
  bool point_ = false;   // temperature 0: the law is a point mass
  bool direct_ = false;  // the target's rows are the law as they are
  bool cut_ = false;     // nothing follows the last draft
  int64_t begin_ = 0;    // first row of a ragged sequence
  int64_t drafts_ = 0;
  int32_t status_ = 0;
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
