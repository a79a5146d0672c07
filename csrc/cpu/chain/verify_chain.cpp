#include <algorithm>
#include <cmath>

#include "cpu/chain/residual.h"
#include "cpu/chain/sequence.h"
#include "cpu/tasks.h"
#include "specdec/chain.h"

namespace specdec::cpu {
namespace {

struct Scratches {
  Scratch target, draft;
  Difference difference;
  std::vector<float> entropies;  // [tiles]
  // Of rule block, one a judged draft.
  std::vector<RowStats> all_stats;
  std::vector<DraftDistribution> drafts;
  std::vector<double> carried;  // c, one more
};

// Verdict on one sequence.
class Sequence : SequenceView<ChainParams> {
 public:
  Sequence(const ChainParams& p, int64_t b, const Parallel& parallel, Scratches& scratch)
      : SequenceView(p, b, parallel), scratch_(scratch) {}

  void verify() {
    for (int64_t i = 0; i <= p_.gamma; ++i) write(i, -1, 0);
    for (int64_t i = 0; i < p_.gamma; ++i) record_accept_prob(i, NAN);
    p_.num_accepted[b_] = 0;
    const int64_t rows = open(p_.rule == Rule::kGreedy, p_.gamma + 1);
    if (rows > 0) {
      limit(rows);
      p_.rule == Rule::kBlock && !state_.greedy ? block() : walk();
    }
    p_.status[b_] = status_;
  }

 private:
  // How many drafts are judged, and whether nothing follows when all of them stand: nothing follows
  // an end-of-sequence token or the last token that may be emitted.
  void limit(int64_t rows) {
    const int64_t most = most_new_tokens(p_, state_);
    cut_ = most == 0;
    while (drafts_ < rows - 1 && !cut_) {
      const int64_t x = drafted(drafts_);
      if (x == -1) return;
      if (x < 0 || x >= p_.id_limit()) {
        missing_ = kDraftOutOfRange;
        return;
      }
      ++drafts_;
      cut_ = drafts_ == most || is_eos(p_, x);
    }
  }

  // Every rule that judges its drafts from the first one on.
  void walk() {
    for (int64_t i = 0; i < drafts_ || (i == drafts_ && !cut_); ++i) {
      if (i == drafts_) status_ |= missing_;
      if (!step(i, i < drafts_ ? drafted(i) : -1)) return;
      ++p_.num_accepted[b_];
    }
  }

  // Judges row i; true if the drafted token x stands.
  bool step(int64_t i, int64_t x) {
    const RowView row = target_row(i);
    const bool gather = state_.direct && x >= 0;
    RowStats stats = gather ? touch(row, x) : measure_target(row);
    if (!stats.valid) {
      status_ |= kTargetNotFinite;
      return false;
    }
    if (state_.greedy || p_.rule == Rule::kMatch) return compare(i, x, row, stats);
    if (x < 0) return emit_from_target(i, row, stats);

    DraftDistribution draft;
    const bool ratio = p_.reads_draft();
    if (ratio) draft = draft_of(i, x);
    if (ratio ? accepts(i, x, row, stats, draft) : likely(i, x, row, stats)) {
      write(i, x, stats.logprob(row, x));
      return true;
    }
    if (gather) {  // the row was only touched so far
      stats = measure_target(row);
      if (!stats.valid) {
        status_ |= kTargetNotFinite;
        return false;
      }
    }
    return ratio ? emit_residual(i, row, stats, draft, 1.0) : emit_from_target(i, row, stats);
  }

  // The target says y, by its maximum or by shared noise.
  bool compare(int64_t i, int64_t x, const RowView& row, const RowStats& stats) {
    const int64_t y = gumbel_argmax(row, stats, scratch_.target, shared_noise(i), parallel_);
    bool stands = x == y;
    if (p_.rule == Rule::kLenient && x >= 0 && x < p_.vocab) {
      stands |= accept_near_maximum(row.at(x), stats.max, p_.lenience, p_.kind == Kind::kProbs);
    }
    if (p_.rule == Rule::kSynthetic) {
      stands = x >= 0 && at_its_rate(i);
    } else if (x >= 0) {
      record_accept_prob(i, stands);
    }
    write(i, stands ? x : y, stats.logprob(row, y));
    return stands;
  }

  bool accepts(int64_t i, int64_t x, const RowView& row, const RowStats& stats,
               const DraftDistribution& draft) {
    if (draft.fault) return false;
    const double u = accept_uniform(p_, state_, i), l = p_.lenience;
    if (stats.direct) {
      return decide(i, accept_ratio(u, x < p_.vocab ? row.at(x) : 0.0f, l * draft.q_x));
    }
    const double log_p = x < p_.vocab ? stats.logprob(row, x) : -INFINITY;
    return decide(i, accept_log_ratio(u, log_p, std::log(l) + draft.log_q_x));
  }

  // Rule synthetic, at every temperature.
  bool at_its_rate(int64_t i) {
    return decide(i, accept_at_rate(accept_uniform(p_, state_, i), p_.synthetic_rates[i]));
  }

  // The rules that ask the target alone, or nobody.
  bool likely(int64_t i, int64_t x, const RowView& row, const RowStats& stats) {
    if (p_.rule == Rule::kSynthetic) return at_its_rate(i);
    const double p_x = std::exp(stats.logprob(row, x)), epsilon = p_.typical_epsilon;
    double bound = 0;
    if (typical_needs_entropy(p_x, epsilon)) {
      const double h = entropy(row, stats, parallel_, scratch_.entropies);
      bound = typical_bound(epsilon, p_.typical_delta, h);
    }
    const bool stands = p_x > bound;
    record_accept_prob(i, stands);
    return stands;
  }

  static double ratio_of(const RowView& row, const RowStats& stats, int64_t x,
                         const DraftDistribution& draft) {
    return stats.direct ? probability_ratio(row.at(x), draft.q_x)
                        : probability_ratio_of_logs(stats.logprob(row, x), draft.log_q_x);
  }

  // Rule block (Sun et al. 2024): the last i with u < h_i, from the end; only the rows that it
  // passes are scanned. A faulty row ends the block before it, as if nothing had been drafted from
  // there on.
  void block() {
    auto& [target, draft, difference, entropies, all_stats, drafts, carried] = scratch_;
    all_stats.clear();
    drafts.clear();
    carried.assign(1, 1.0);
    int64_t end = drafts_;
    int32_t fault = 0;
    for (int64_t i = 0; i < drafts_; ++i) {
      const int64_t x = drafted(i);
      const RowView row = target_row(i);
      all_stats.push_back(state_.direct ? touch(row, x) : measure_target(row));
      fault = all_stats[i].valid ? 0 : kTargetNotFinite;
      if (fault == 0) {
        drafts.push_back(draft_of(i, x));
        fault = drafts[i].fault ? kDraftNotFinite : 0;
      }
      if (fault != 0) {
        end = i;
        break;
      }
      const double ratio = x < p_.vocab ? ratio_of(row, all_stats[i], x, drafts[i]) : 0;
      carried.push_back(next_carried(carried[i], ratio));
    }

    int64_t tau = end;
    for (; tau > 0; --tau) {
      const double c = carried[tau];
      double h = c;
      if (tau < end) {
        if (state_.direct) all_stats[tau] = measure_target(target_row(tau));
        fault = all_stats[tau].valid ? 0 : kTargetNotFinite;
        Difference& d = scratch_.difference;
        if (fault == 0) {
          const RowView row = target_row(tau);
          const Pair pair{row, all_stats[tau], drafts[tau], c, 1.0f};
          if (worth_looking_up(drafts[tau]) && !state_.direct) {
            look_up(pair, d);
          } else {
            scan(pair, true, parallel_, d);
          }
          fault = d.valid ? 0 : kDraftNotFinite;
        }
        if (fault != 0) {
          end = tau;
        } else {
          h = block_accept_prob(c, d.more, d.less);
        }
      }
      record_accept_prob(tau - 1, h);
      if (block_accept_uniform(p_, state_, tau - 1) < h) break;
    }
    p_.num_accepted[b_] = static_cast<int32_t>(tau);
    for (int64_t i = 0; i < tau; ++i) {
      const RowView row = target_row(i);
      const int64_t x = drafted(i);
      write(i, x, all_stats[i].logprob(row, x));
    }
    const bool whole = tau == end;
    if (whole && fault == 0 && cut_) return;
    if (whole) status_ |= fault != 0 ? fault : missing_;
    if (!whole || fault != kTargetNotFinite) follow(tau, whole);
  }

  // The token after a block of tau drafts.
  void follow(int64_t tau, bool whole) {
    const RowView row = target_row(tau);
    const bool known = !whole && !(state_.direct && tau == 0);  // that row was only touched so far
    const RowStats stats = known ? scratch_.all_stats[tau] : measure_target(row);
    if (!stats.valid) {
      status_ |= kTargetNotFinite;
    } else if (whole) {
      emit_from_target(tau, row, stats);
    } else {
      emit_residual(tau, row, stats, scratch_.drafts[tau], scratch_.carried[tau]);
    }
  }

  // Y ~ norm(max(cP - lQ, 0)), or ~ P where there is nothing to subtract or nothing left.
  bool emit_residual(int64_t i, const RowView& row, const RowStats& stats,
                     const DraftDistribution& draft, double c) {
    Difference& d = scratch_.difference;
    const Pair pair{row, stats, draft, c, p_.lenience};
    d.valid = !draft.fault;
    int64_t y = -1;
    if (d.valid && stats.listed && p_.rule != Rule::kBlock) {  // which measured other rows since
      d.valid = draft.whole_row_valid(parallel_);
      if (d.valid)
        y = draw_among(pair, *scratch_.target.survivors, residual_uniform(p_, state_, i));
    } else if (d.valid) {
      scan(pair, false, parallel_, d);
      if (d.valid && d.more > 0) {
        y = draw(row, d.sums, residual_uniform(p_, state_, i),
                 [&](int64_t t, float* out) { pair.residual(t, out, nullptr); });
      }
    }
    if (y < 0) {
      status_ |= d.valid ? kEmptyResidual : kDraftNotFinite;
      if (p_.rule == Rule::kBlock) measure_target(row);  // its tile sums are another row's by now
      return emit_from_target(i, row, stats);
    }
    write(i, y, stats.logprob(row, y));
    return false;
  }

  bool emit_from_target(int64_t i, const RowView& row, const RowStats& stats) {
    const int64_t y = draw(row, stats, scratch_.target, residual_uniform(p_, state_, i));
    write(i, y, stats.logprob(row, y));
    return false;
  }

  DraftDistribution draft_of(int64_t i, int64_t x) {
    return draft_distribution(p_.draft, b_, draft_row(p_, state_, i),
                              draft_statistic(p_, state_, i), x, state_.q_temperature, parallel_,
                              scratch_.draft);
  }

  // A row that holds the law is judged at the drafted token alone.
  RowStats touch(const RowView& row, int64_t x) const {
    RowStats stats;
    stats.direct = true;
    const float at = x < p_.vocab ? row.at(x) : 0;
    stats.valid = std::isfinite(at) && at >= 0;
    return stats;
  }

  RowStats measure_target(const RowView& row) {
    return SequenceView::measure_target(row, scratch_.target);
  }

  void write(int64_t i, int64_t token, double logprob) const {
    write_at(b_ * (p_.gamma + 1) + i, token, logprob);
  }
  // The probability with which draft i was to stand.
  void record_accept_prob(int64_t i, double probability) const {
    record_accept_prob_at(b_ * p_.gamma + i, probability);
  }

  bool decide(int64_t i, const Acceptance& a) const {
    record_accept_prob(i, a.probability);
    return a.accepted;
  }

  Scratches& scratch_;
  bool cut_ = false;  // nothing follows the last draft
  int64_t drafts_ = 0;
  int32_t missing_ = 0;  // status of the position after the drafts
};

}  // namespace

void verify_chain(const ChainParams& p, const Parallel& parallel) {
  const int64_t work = p.batch * (p.gamma + 1) * p.vocab;
  each_sequence<Scratches>(parallel, p.batch, work,
                           [&](int64_t b, const Parallel& inner, Scratches& scratch) {
                             Sequence(p, b, inner, scratch).verify();
                           });
}

}  // namespace specdec::cpu
