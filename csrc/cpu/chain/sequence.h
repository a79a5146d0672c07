#pragma once
// What all rules that verify read and write of one sequence.
#include <algorithm>
#include <cmath>

#include "cpu/row/draft.h"
#include "specdec/verification.h"

namespace specdec::cpu {

template <class OpParams>
class SequenceView {
 public:
  SequenceView(const OpParams& p, int64_t b, const Parallel& parallel)
      : parallel_(parallel), p_(p), b_(b) {}

 protected:
  // Reads its parameters; returns how many rows it has, of `most`: 0 where nothing can be judged,
  // and the status says why.
  int64_t open(bool greedy, int64_t most) {
    params_ = params_of(p_.sampling, b_);
    q_temperature_ = params_.temperature;
    if (p_.reads_draft() && p_.draft.form == DraftForm::kSampled) {
      q_temperature_ = p_.draft.temperatures ? p_.draft.temperatures[b_] : p_.draft.temperature;
    }
    if (!params_.valid() || !(std::isfinite(q_temperature_) && q_temperature_ >= 0)) {
      status_ = kBadParameter;
      return 0;
    }
    if (greedy) params_ = {0.0f, 0, 1.0f, 0.0f};
    greedy_ = params_.temperature == 0;
    direct_ = p_.kind == Kind::kProbs && p_.reads_draft() && params_.temperature == 1 &&
              !params_.filters(p_.vocab);
    int64_t rows = most;
    if (p_.target_indptr != nullptr) {
      begin_ = std::clamp<int64_t>(p_.target_indptr[b_], 0, p_.num_rows);
      rows = std::clamp<int64_t>(p_.target_indptr[b_ + 1], begin_, p_.num_rows) - begin_;
    }
    if (rows == 0) status_ = kTargetNotFinite;
    return std::min(rows, most);
  }

  RowView target_row(int64_t i) const {
    const bool as_log = p_.kind == Kind::kProbs && !direct_ && !greedy_;
    return p_.target_indptr != nullptr ? RowView(p_.target, 0, begin_ + i, p_.vocab, as_log)
                                       : RowView(p_.target, b_, i, p_.vocab, as_log);
  }
  RowStats measure_target(const RowView& row, Scratch& scratch) const {
    if (p_.kind == Kind::kProbs && (direct_ || greedy_)) {
      const RowStats stats = measure_direct(row, parallel_, scratch);
      if (direct_ || !stats.valid) return stats;
    }
    return measure(row, params_, parallel_, scratch);
  }

  int64_t drafted(int64_t i) const { return p_.drafted(b_, i); }

  uint64_t seed() const { return static_cast<uint64_t>(p_.seeds[b_]); }
  uint64_t position(int64_t i) const {
    return static_cast<uint64_t>(p_.positions[b_]) + static_cast<uint64_t>(i);
  }

  // A token and the probability to accept a draft, where they stand in the outputs.
  void write_at(int64_t at, int64_t token, double logprob) const {
    put_id(p_.tokens, p_.ids_are_int64, at, token);
    if (p_.logprobs != nullptr) p_.logprobs[at] = greedy_ ? 0.0f : static_cast<float>(logprob);
  }
  void record_accept_prob_at(int64_t at, double probability) const {
    if (p_.accept_probs == nullptr) return;
    p_.accept_probs[at] = static_cast<float>(probability > 1 ? 1.0 : probability);
  }

  const Parallel& parallel_;
  const OpParams& p_;
  const int64_t b_;
  SequenceParams params_{};
  float q_temperature_ = 1;
  bool greedy_ = false;   // temperature 0: the law is a point mass
  bool direct_ = false;  // the target's rows are the law as they are
  int64_t begin_ = 0;    // first row of a ragged sequence
  int32_t status_ = 0;
};

}  // namespace specdec::cpu
