#pragma once
// What the rules of verify_chain read and write of one sequence.
#include <cmath>

#include "cpu/row.h"
#include "specdec/chain.h"

namespace specdec {

class SequenceView {
 public:
  SequenceView(const ChainParams& p, int64_t b) : p_(p), b_(b) {}

 protected:
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
  // Of a rule that looks ahead, where a coin may have shaped what was emitted before its position:
  // the next round must not meet it again, so it belongs to where this round began.
  double coin_of_block(int64_t i) const {
    if (p_.uniforms != nullptr) return coin(i);
    return uniform(seed(), position(0), kAcceptStream, static_cast<uint32_t>(i));
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
  bool point_ = false;   // temperature 0: the law is a point mass
  bool direct_ = false;  // the target's rows are the law as they are
  int64_t begin_ = 0;    // first row of a ragged sequence
};

}  // namespace specdec
