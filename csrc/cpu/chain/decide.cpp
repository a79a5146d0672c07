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

// Counts the drafts to verify. They end before the first -1 or id out of range, and with an
// end-of-sequence token or the last token that may be emitted.
void ChainVerifier::find_drafts(int64_t rows) {
  const int64_t most = most_new_tokens(p_, state_);
  no_bonus_ = most == 0;
  while (num_drafts_ < rows - 1 && !no_bonus_) {
    const int64_t x = drafted(num_drafts_);
    if (x == -1) return;
    if (x < 0 || x >= p_.id_limit()) {
      status_after_drafts_ = kDraftOutOfRange;
      return;
    }
    ++num_drafts_;
    no_bonus_ = num_drafts_ == most || is_eos(p_, x);
  }
}

// Every rule but block: drafts are accepted one after the other until one is rejected.
void ChainVerifier::decide_in_order() {
  for (int64_t i = 0; i < num_drafts_ || (i == num_drafts_ && !no_bonus_); ++i) {
    if (i == num_drafts_) status_ |= status_after_drafts_;
    if (!decide_row(i, i < num_drafts_ ? drafted(i) : -1)) return;
    ++p_.num_accepted[b_];
  }
}

// Decides on the drafted token x, which is -1 after the last draft. Emits x and returns true if it
// is accepted; else emits the recovered or bonus token.
bool ChainVerifier::decide_row(int64_t i, int64_t x) {
  const RowView row = target_row(i);
  const bool reads_one_entry = state_.direct && x >= 0;
  RowStats stats = reads_one_entry ? check_entry(row, x) : measure_target(row);
  if (!stats.valid) {
    status_ |= target_fault(p_, state_, i);
    return false;
  }
  if (state_.greedy || p_.rule == Rule::kMatch) return accept_target_token(i, x, row, stats);
  if (x < 0) {
    emit_from_target(i, row, stats);
    return false;
  }

  DraftDistribution draft;
  bool accepted = false;
  if (p_.reads_draft()) {
    draft = draft_of(i, x);
    accepted = accepts_ratio(i, x, row, stats, draft);
  } else {
    switch (p_.rule) {
      case Rule::kSynthetic:
        accepted = accepts_at_rate(i);
        break;
      case Rule::kTopBeta:
        accepted = accepts_top_beta(x, row, stats);
        record_accept_prob(i, accepted);
        break;
      default:
        accepted = accepts_typical(i, x, row, stats);
    }
  }
  if (accepted) {
    write(i, x, stats.logprob(row, x));
    return true;
  }
  if (reads_one_entry) {
    stats = measure_target(row);
    if (!stats.valid) {
      status_ |= kTargetInvalid;
      return false;
    }
  }
  p_.reads_draft() ? emit_residual(i, row, stats, draft, 1.0) : emit_from_target(i, row, stats);
  return false;
}

// The target chooses y, by its maximum or by the shared noise, and x is accepted if it is y.
bool ChainVerifier::accept_target_token(int64_t i, int64_t x, const RowView& row,
                                        const RowStats& stats) {
  const int64_t y = gumbel_argmax(row, stats, scratch_.target, shared_noise(i), parallel_);
  bool accepted = x == y;
  if (p_.rule == Rule::kLenient && x >= 0 && x < p_.vocab) {
    accepted |= accept_near_maximum(row.at(x), stats.max, p_.lenience, p_.kind == Kind::kProbs);
  }
  if (p_.rule == Rule::kTopBeta && x >= 0) accepted |= accepts_top_beta(x, row, stats);
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
  if (draft.invalid_at_token) return false;
  const bool in_target = x < p_.vocab;
  return record(
      i, accept_draft(stats.direct, accept_uniform(p_, state_, i), in_target ? row.at(x) : 0.0f,
                      in_target ? stats.logprob(row, x) : -INFINITY, p_.lenience, draft));
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

// Rule top_beta. At temperature 0 P is that of temperature 1 without filters.
bool ChainVerifier::accepts_top_beta(int64_t x, const RowView& row, const RowStats& stats) {
  const float value = row.at(x);
  const bool probabilities = p_.kind == Kind::kProbs && state_.greedy;
  if (!within_top_distance(value, stats.max, state_.greedy ? 1 : stats.inv_t, p_.top_beta_distance,
                           probabilities) ||
      (!state_.greedy && stats.logprob(row, x) == -INFINITY)) {
    return false;
  }
  return value == stats.max ||
         count_larger(row, value, parallel_, scratch_.entropies) < p_.top_beta_rank;
}

// Rule synthetic, at every temperature.
bool ChainVerifier::accepts_at_rate(int64_t i) {
  return record(i, accept_at_rate(accept_uniform(p_, state_, i), p_.synthetic_rates[i]));
}

// Draws the recovered token from the residual; or from P if the draft row is not valid or the
// residual is empty.
void ChainVerifier::emit_residual(int64_t i, const RowView& row, const RowStats& stats,
                                  const DraftDistribution& draft, double c) {
  ResidualSums& sums = scratch_.residual;
  const RowPair pair{row, stats, draft, c, p_.lenience};
  const double u = residual_uniform(p_, state_, i);
  sums.valid = !draft.invalid_at_token;
  int64_t y = -1;
  // Under rule block the listed survivors are those of the row that was measured last.
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
    if (p_.rule == Rule::kBlock) measure_target(row);  // restores the tile sums of this row
    return emit_from_target(i, row, stats);
  }
  write(i, y, stats.logprob(row, y));
}

void ChainVerifier::emit_from_target(int64_t i, const RowView& row, const RowStats& stats) {
  const int64_t y = draw(row, stats, scratch_.target, residual_uniform(p_, state_, i));
  write(i, y, stats.logprob(row, y));
}

DraftDistribution ChainVerifier::draft_of(int64_t i, int64_t x) {
  return draft_distribution(p_.draft, b_, draft_row(p_, state_, i), draft_statistic(p_, state_, i),
                            x, state_.draft_temperature, parallel_, scratch_.draft);
}

// A direct row is read at the drafted token alone until that token is rejected.
RowStats ChainVerifier::check_entry(const RowView& row, int64_t x) const {
  RowStats stats;
  stats.direct = true;
  const float value = x < p_.vocab ? row.at(x) : 0;
  stats.valid = std::isfinite(value) && value >= 0;
  return stats;
}

}  // namespace specdec::cpu
