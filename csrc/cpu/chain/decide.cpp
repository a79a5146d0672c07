#include "cpu/chain/decide.h"

#include <algorithm>
#include <cmath>

namespace specdec::cpu {

void ChainVerifier::verify() {
  for (int64_t i = 0; i <= p_.gamma; ++i) write(i, -1, 0);
  for (int64_t i = 0; i < p_.gamma; ++i) record_accept_prob(i, NAN);
  p_.num_accepted[b_] = 0;
  const int64_t rows = open(p_.rule == Rule::kGreedy, p_.gamma + 1);
  if (rows > 0) {
    find_drafts(rows);
    p_.rule == Rule::kBlock && !state_.greedy ? decide_block() : decide_in_order();
  }
  p_.status[b_] = status_;
}

// Drafts end at the first -1, and nothing follows an end-of-sequence token or the last token that
// may be emitted.
void ChainVerifier::find_drafts(int64_t rows) {
  const int64_t most = most_new_tokens(p_, state_);
  ends_ = most == 0;
  while (drafts_ < rows - 1 && !ends_) {
    const int64_t x = drafted(drafts_);
    if (x == -1) return;
    if (x < 0 || x >= p_.id_limit()) {
      after_drafts_ = kDraftOutOfRange;
      return;
    }
    ++drafts_;
    ends_ = drafts_ == most || is_eos(p_, x);
  }
}

// Every rule but block: drafts are accepted one after the other until one is rejected.
void ChainVerifier::decide_in_order() {
  for (int64_t i = 0; i < drafts_ || (i == drafts_ && !ends_); ++i) {
    if (i == drafts_) status_ |= after_drafts_;
    if (!decide_row(i, i < drafts_ ? drafted(i) : -1)) return;
    ++p_.num_accepted[b_];
  }
}

// Emits the drafted token x if it is accepted and returns true, else emits the token that follows.
bool ChainVerifier::decide_row(int64_t i, int64_t x) {
  const RowView row = target_row(i);
  const bool one_entry = state_.direct && x >= 0;
  RowStats stats = one_entry ? check_entry(row, x) : measure_target(row);
  if (!stats.valid) {
    status_ |= kTargetInvalid;
    return false;
  }
  if (state_.greedy || p_.rule == Rule::kMatch) return compare(i, x, row, stats);
  if (x < 0) return emit_from_target(i, row, stats);

  DraftDistribution draft;
  bool accepted = false;
  if (p_.reads_draft()) {
    draft = draft_of(i, x);
    accepted = accepts_ratio(i, x, row, stats, draft);
  } else {
    accepted = p_.rule == Rule::kSynthetic ? accepts_at_rate(i) : accepts_typical(i, x, row, stats);
  }
  if (accepted) {
    write(i, x, stats.logprob(row, x));
    return true;
  }
  if (one_entry) {
    stats = measure_target(row);
    if (!stats.valid) {
      status_ |= kTargetInvalid;
      return false;
    }
  }
  return p_.reads_draft() ? emit_residual(i, row, stats, draft, 1.0)
                          : emit_from_target(i, row, stats);
}

// The target chooses y, by its maximum or by the shared noise, and x is accepted if it is y.
bool ChainVerifier::compare(int64_t i, int64_t x, const RowView& row, const RowStats& stats) {
  const int64_t y = gumbel_argmax(row, stats, scratch_.target, shared_noise(i), parallel_);
  bool accepted = x == y;
  if (p_.rule == Rule::kLenient && x >= 0 && x < p_.vocab) {
    accepted |= accept_near_maximum(row.at(x), stats.max, p_.lenience, p_.kind == Kind::kProbs);
  }
  if (p_.rule == Rule::kSynthetic) {
    accepted = x >= 0 && accepts_at_rate(i);
  } else if (x >= 0) {
    record_accept_prob(i, accepted);
  }
  write(i, accepted ? x : y, stats.logprob(row, y));
  return accepted;
}

bool ChainVerifier::accepts_ratio(int64_t i, int64_t x, const RowView& row, const RowStats& stats,
                                  const DraftDistribution& draft) {
  if (draft.fault) return false;
  const double u = accept_uniform(p_, state_, i), l = p_.lenience;
  if (stats.direct) {
    return decide(i, accept_ratio(u, x < p_.vocab ? row.at(x) : 0.0f, l * draft.q_x));
  }
  const double log_p = x < p_.vocab ? stats.logprob(row, x) : -INFINITY;
  return decide(i, accept_log_ratio(u, log_p, std::log(l) + draft.log_q_x));
}

bool ChainVerifier::accepts_typical(int64_t i, int64_t x, const RowView& row,
                                    const RowStats& stats) {
  const double p_x = std::exp(stats.logprob(row, x)), epsilon = p_.typical_epsilon;
  double bound = 0;
  if (typical_needs_entropy(p_x, epsilon)) {
    const double h = entropy(row, stats, parallel_, scratch_.entropies);
    bound = typical_bound(epsilon, p_.typical_delta, h);
  }
  const bool accepted = p_x > bound;
  record_accept_prob(i, accepted);
  return accepted;
}

// Rule synthetic, at every temperature.
bool ChainVerifier::accepts_at_rate(int64_t i) {
  return decide(i, accept_at_rate(accept_uniform(p_, state_, i), p_.synthetic_rates[i]));
}

// Measures the drafted rows and computes the factors c_i. Returns the number of drafts before the
// first faulty row, which ends the block as if nothing had been drafted from there on.
int64_t ChainVerifier::measure_block() {
  auto& [target, draft, residual, entropies, all_stats, drafts, carried] = scratch_;
  all_stats.clear();
  drafts.clear();
  carried.assign(1, 1.0);
  for (int64_t i = 0; i < drafts_; ++i) {
    const int64_t x = drafted(i);
    const RowView row = target_row(i);
    all_stats.push_back(state_.direct ? check_entry(row, x) : measure_target(row));
    const RowStats& stats = all_stats[i];
    block_fault_ = stats.valid ? 0 : kTargetInvalid;
    if (block_fault_ == 0) {
      drafts.push_back(draft_of(i, x));
      block_fault_ = drafts[i].fault ? kDraftInvalid : 0;
    }
    if (block_fault_ != 0) return i;
    double ratio = 0;
    if (x < p_.vocab) {
      ratio = stats.direct ? probability_ratio(row.at(x), drafts[i].q_x)
                           : probability_ratio_of_logs(stats.logprob(row, x), drafts[i].log_q_x);
    }
    carried.push_back(next_carried(carried[i], ratio));
  }
  return drafts_;
}

// Rule block (Sun et al. 2024) accepts the first tau drafts, the largest tau with u < h_tau. It is
// looked for from the end, so that only the rows beyond it are read twice.
void ChainVerifier::decide_block() {
  int64_t end = measure_block(), tau = end;
  for (; tau > 0; --tau) {
    const double c = scratch_.carried[tau];
    double h = c;
    if (tau < end) {
      const RowView row = target_row(tau);
      RowStats& stats = scratch_.all_stats[tau];
      ResidualSums& sums = scratch_.residual;
      if (state_.direct) stats = measure_target(row);
      block_fault_ = stats.valid ? 0 : kTargetInvalid;
      if (block_fault_ == 0) {
        const DraftDistribution& draft = scratch_.drafts[tau];
        const RowPair pair{row, stats, draft, c, 1.0f};
        if (worth_looking_up(draft) && !state_.direct) {
          sum_residual_of_few(pair, sums);
        } else {
          sum_residual(pair, true, parallel_, sums);
        }
        block_fault_ = sums.valid ? 0 : kDraftInvalid;
      }
      if (block_fault_ != 0) {
        end = tau;
      } else {
        h = block_accept_prob(c, sums.positive, sums.negative);
      }
    }
    record_accept_prob(tau - 1, h);
    if (block_accept_uniform(p_, state_, tau - 1) < h) break;
  }
  p_.num_accepted[b_] = static_cast<int32_t>(tau);
  for (int64_t i = 0; i < tau; ++i) {
    const int64_t x = drafted(i);
    write(i, x, scratch_.all_stats[i].logprob(target_row(i), x));
  }
  const bool whole = tau == end;
  if (whole && block_fault_ == 0 && ends_) return;
  if (whole) status_ |= block_fault_ != 0 ? block_fault_ : after_drafts_;
  if (!whole || block_fault_ != kTargetInvalid) emit_after_block(tau, whole);
}

// Emits the bonus token if the whole block was accepted, else the recovered one.
void ChainVerifier::emit_after_block(int64_t tau, bool whole) {
  const RowView row = target_row(tau);
  const bool measured = !whole && !(state_.direct && tau == 0);
  const RowStats stats = measured ? scratch_.all_stats[tau] : measure_target(row);
  if (!stats.valid) {
    status_ |= kTargetInvalid;
  } else if (whole) {
    emit_from_target(tau, row, stats);
  } else {
    emit_residual(tau, row, stats, scratch_.drafts[tau], scratch_.carried[tau]);
  }
}

// Draws from the residual max(cP - lQ, 0); or from P if the draft row is not valid or the residual
// is empty.
bool ChainVerifier::emit_residual(int64_t i, const RowView& row, const RowStats& stats,
                                  const DraftDistribution& draft, double c) {
  ResidualSums& sums = scratch_.residual;
  const RowPair pair{row, stats, draft, c, p_.lenience};
  const double u = residual_uniform(p_, state_, i);
  sums.valid = !draft.fault;
  int64_t y = -1;
  // Rule block has measured other rows since: the survivors are theirs.
  if (sums.valid && stats.listed && p_.rule != Rule::kBlock) {
    sums.valid = draft.whole_row_valid(parallel_);
    if (sums.valid) y = draw_among_survivors(pair, *scratch_.target.survivors, u);
  } else if (sums.valid) {
    sum_residual(pair, false, parallel_, sums);
    if (sums.valid && sums.positive > 0) {
      y = draw(row, sums.positive_tiles, u,
               [&](int64_t t, float* out) { pair.residual_tile(t, out, nullptr); });
    }
  }
  if (y < 0) {
    status_ |= sums.valid ? kEmptyResidual : kDraftInvalid;
    if (p_.rule == Rule::kBlock) measure_target(row);  // the tile sums are another row's by now
    return emit_from_target(i, row, stats);
  }
  write(i, y, stats.logprob(row, y));
  return false;
}

bool ChainVerifier::emit_from_target(int64_t i, const RowView& row, const RowStats& stats) {
  const int64_t y = draw(row, stats, scratch_.target, residual_uniform(p_, state_, i));
  write(i, y, stats.logprob(row, y));
  return false;
}

DraftDistribution ChainVerifier::draft_of(int64_t i, int64_t x) {
  return draft_distribution(p_.draft, b_, draft_row(p_, state_, i), draft_statistic(p_, state_, i),
                            x, state_.q_temperature, parallel_, scratch_.draft);
}

// A row that holds P itself is read at the drafted token alone until that is rejected.
RowStats ChainVerifier::check_entry(const RowView& row, int64_t x) const {
  RowStats stats;
  stats.direct = true;
  const float value = x < p_.vocab ? row.at(x) : 0;
  stats.valid = std::isfinite(value) && value >= 0;
  return stats;
}

}  // namespace specdec::cpu
