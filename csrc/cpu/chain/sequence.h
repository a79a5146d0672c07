#pragma once
// One sequence as the verifiers of chains and trees read it and write its outputs.
#include <algorithm>
#include <cmath>

#include "cpu/row/draft.h"
#include "specdec/acceptance.h"
#include "specdec/sequence.h"

namespace specdec::cpu {

template <class OpParams>
class SequenceView {
 public:
  SequenceView(const OpParams& p, int64_t b, const Parallel& parallel)
      : parallel_(parallel), p_(p), b_(b) {}

 protected:
  // Returns how many rows the sequence has; where it has none, the status says why.
  int64_t open(bool greedy, int64_t most) {
    status_ = open_sequence(p_, greedy, b_, most, state_);
    return state_.rows;
  }

  RowView target_row(int64_t i) const {
    const RowIndex at = target_row_index(p_, state_, i);
    return RowView(p_.target, at.sequence, at.row, p_.vocab, target_read(p_, state_));
  }
  RowStats measure_target(const RowView& row, Scratch& scratch) const {
    if (p_.kind == Kind::kProbs && (state_.direct || state_.greedy)) {
      const RowStats stats = measure_direct(row, parallel_, scratch);
      if (state_.direct || !stats.valid) return stats;
    }
    return measure(row, state_.params, parallel_, scratch);
  }

  int64_t drafted(int64_t i) const { return p_.drafted(b_, i); }

  // The noise that drafter and target share at the i-th position of the round.
  GumbelNoise shared_noise(int64_t i) const {
    return {state_.seed, state_.position + static_cast<uint64_t>(i), kSharedStream};
  }

  // `at` is an index into the outputs of all sequences.
  void write_at(int64_t at, int64_t token, double logprob) const {
    put_id(p_.tokens, p_.ids_are_int64, at, token);
    if (p_.logprobs != nullptr) {
      p_.logprobs[at] = state_.greedy ? 0.0f : static_cast<float>(logprob);
    }
  }
  void record_accept_prob_at(int64_t at, double probability) const {
    if (p_.accept_probs == nullptr) return;
    p_.accept_probs[at] = recorded_accept_prob(probability);
  }

  const Parallel& parallel_;
  const OpParams& p_;
  const int64_t b_;
  SequenceState state_{};
  int32_t status_ = 0;
};

}  // namespace specdec::cpu
