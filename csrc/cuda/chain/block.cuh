#pragma once
// Rule block (Sun et al. 2024): first every drafted row is recorded, then the first tau drafts are
// accepted, where tau is the largest with u < h_tau. See docs/rules.md#block.
#include "cuda/chain/decide.cuh"

namespace specdec::cuda {

// Records a drafted row. A row that is not valid ends the block before it, as if nothing had been
// drafted from there on.
template <Variant kVariant>
__device__ void ChainVerifier<kVariant>::record_row() {
  const int64_t i = t_.i;
  read_entry();
  if (t_.reads_one_entry) check_entry();
  t_.block_fault = !t_.stats.valid ? kTargetInvalid : t_.draft.invalid_at_token ? kDraftInvalid : 0;
  if (t_.block_fault != 0) {
    t_.end = i;
    return search_from_end(i);
  }
  ChainRecord& now = row_record(i);
  now.stats = t_.stats;
  now.draft = t_.draft;
  now.logprob = drafted_logprob();
  double ratio = 0;
  if (t_.x < p_.vocab) {
    ratio = ratio_of_draft(t_.direct, t_.entry, now.logprob, t_.draft);
  }
  row_record(i + 1).p_scale = next_p_scale(now.p_scale, ratio);
  i + 1 < t_.num_drafts ? open_next(i + 1) : search_from_end(i + 1);
}

// Looks for tau from the end, so that only the rows after it are read twice.
template <Variant kVariant>
__device__ void ChainVerifier<kVariant>::search_from_end(int64_t tau) {
  t_.tau = tau;
  for (; t_.tau > 0; --t_.tau) {
    const double c = row_record(t_.tau).p_scale;
    if (t_.tau < t_.end) {
      t_.state = State::kBlockFromEnd;
      restore_row(t_.tau);
      return subtract(c);
    }
    if (accepts_block(c)) break;
  }
  end_block(false);
}

template <Variant kVariant>
__device__ void ChainVerifier<kVariant>::decide_from_end() {
  double h = t_.c;
  t_.block_fault = !t_.stats.valid ? kTargetInvalid : t_.valid ? 0 : kDraftInvalid;
  if (t_.block_fault != 0) {
    t_.end = t_.tau;
  } else {
    h = block_accept_prob(t_.c, t_.positive, t_.negative);
  }
  accepts_block(h) ? end_block(true) : search_from_end(t_.tau - 1);
}

template <Variant kVariant>
__device__ bool ChainVerifier<kVariant>::accepts_block(double h) const {
  record_accept_prob(t_.tau - 1, h);
  return block_accept_uniform(p_, t_, t_.tau - 1) < h;
}

template <Variant kVariant>
__device__ void ChainVerifier<kVariant>::restore_row(int64_t i) {
  open_row(i);
  t_.stats = row_record(i).stats;
  t_.draft = row_record(i).draft;
}

// residual_is_summed: the last action summed the residual of row tau.
template <Variant kVariant>
__device__ void ChainVerifier<kVariant>::end_block(bool residual_is_summed) {
  const int64_t tau = t_.tau;
  t_.accepted = static_cast<int32_t>(tau);
  for (int64_t i = 0; i < tau; ++i) write(i, p_.drafted(t_.b, i), row_record(i).logprob);
  t_.state = State::kBlockFollow;
  if (tau == t_.end) {
    if (t_.block_fault == 0 && t_.no_bonus) return finish();
    t_.status |= t_.block_fault != 0 ? t_.block_fault : t_.status_after_drafts;
    if (t_.block_fault == kTargetInvalid) return finish();
    t_.i = tau;
    // The tile statistics of a bonus row have not been overwritten.
    return tau == t_.num_drafts ? open_next(tau) : measure_whole(State::kBlockFollow);
  }
  if (residual_is_summed && !t_.sums_residual_of_few()) return after_residual();
  restore_row(tau);
  subtract(row_record(tau).p_scale);
}

}  // namespace specdec::cuda
