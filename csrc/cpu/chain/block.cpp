// Rule block (Sun et al. 2024): all drafts are decided together. See docs/rules.md#block.
#include "cpu/chain/decide.h"

namespace specdec::cpu {

// Accepts the first tau drafts, where tau is the largest i with u_i < h_i, or 0. The search starts
// at the end, so that only the rows after the accepted drafts are read twice.
void ChainVerifier::decide_block() {
  int64_t end = measure_block(), tau = end;
  for (; tau > 0; --tau) {
    const double c = scratch_.p_scales[tau];
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
  if (whole && block_fault_ == 0 && no_bonus_) return;
  if (whole && block_fault_ == kTargetInvalid) {
    status_ |= target_fault(p_, state_, tau);
    return;
  }
  if (whole) status_ |= block_fault_ != 0 ? block_fault_ : status_after_drafts_;
  emit_after_block(tau, whole);
}

// Measures the drafted rows and computes the factors c_i. Returns the number of drafts before the
// first faulty row, which ends the block as if nothing had been drafted from there on.
int64_t ChainVerifier::measure_block() {
  auto& [target, draft, residual, entropies, all_stats, drafts, p_scales] = scratch_;
  all_stats.clear();
  drafts.clear();
  p_scales.assign(1, 1.0);
  for (int64_t i = 0; i < num_drafts_; ++i) {
    const int64_t x = drafted(i);
    const RowView row = target_row(i);
    all_stats.push_back(state_.direct ? check_entry(row, x) : measure_target(row));
    const RowStats& stats = all_stats[i];
    block_fault_ = stats.valid ? 0 : kTargetInvalid;
    if (block_fault_ == 0) {
      drafts.push_back(draft_of(i, x));
      block_fault_ = drafts[i].invalid_at_token ? kDraftInvalid : 0;
    }
    if (block_fault_ != 0) return i;
    double ratio = 0;
    if (x < p_.vocab) {
      ratio = ratio_of_draft(stats.direct, row.at(x), stats.logprob(row, x), drafts[i]);
    }
    p_scales.push_back(next_p_scale(p_scales[i], ratio));
  }
  return num_drafts_;
}

// Emits the bonus token if the whole block was accepted, else the recovered one.
void ChainVerifier::emit_after_block(int64_t tau, bool whole) {
  const RowView row = target_row(tau);
  const bool measured = !whole && !(state_.direct && tau == 0);
  const RowStats stats = measured ? scratch_.all_stats[tau] : measure_target(row);
  if (!stats.valid) {
    status_ |= target_fault(p_, state_, tau);
  } else if (whole) {
    emit_from_target(tau, row, stats);
  } else {
    emit_residual(tau, row, stats, scratch_.drafts[tau], scratch_.p_scales[tau]);
  }
}

}  // namespace specdec::cpu
