#pragma once
// Decides which drafts of one sequence are accepted, and emits them with the token that follows.
#include <vector>

#include "cpu/chain/residual.h"
#include "cpu/chain/sequence.h"
#include "specdec/chain.h"

namespace specdec::cpu {

// Memory that one thread reuses from sequence to sequence.
struct ChainScratch {
  Scratch target, draft;
  ResidualSums residual;
  std::vector<float> entropies;  // [tiles], or counts of rule top_beta
  // Rule block, one for each draft.
  std::vector<RowStats> all_stats;
  std::vector<DraftDistribution> drafts;
  std::vector<double> p_scales;  // c_i, one more than drafts
};

class ChainVerifier : SequenceView<ChainParams> {
 public:
  ChainVerifier(const ChainParams& p, int64_t b, const Parallel& parallel, ChainScratch& scratch)
      : SequenceView(p, b, parallel), scratch_(scratch) {}

  void verify();

 private:
  void find_drafts(int64_t rows);

  void decide_in_order();
  bool decide_row(int64_t i, int64_t x);
  bool accept_target_token(int64_t i, int64_t x, const RowView& row, const RowStats& stats);
  bool accepts_ratio(int64_t i, int64_t x, const RowView& row, const RowStats& stats,
                     const DraftDistribution& draft);
  bool accepts_typical(int64_t i, int64_t x, const RowView& row, const RowStats& stats);
  bool accepts_top_beta(int64_t x, const RowView& row, const RowStats& stats);
  bool accepts_at_rate(int64_t i);

  // Rule block, in block.cpp.
  void decide_block();
  int64_t measure_block();
  void emit_after_block(int64_t tau, bool whole);

  void emit_residual(int64_t i, const RowView& row, const RowStats& stats,
                     const DraftDistribution& draft, double c);
  void emit_from_target(int64_t i, const RowView& row, const RowStats& stats);

  DraftDistribution draft_of(int64_t i, int64_t x);
  RowStats check_entry(const RowView& row, int64_t x) const;
  RowStats measure_target(const RowView& row) {
    return SequenceView::measure_target(row, scratch_.target);
  }

  void write(int64_t i, int64_t token, double logprob) const {
    write_at(b_ * (p_.gamma + 1) + i, token, logprob);
  }
  void record_accept_prob(int64_t i, double probability) const {
    record_accept_prob_at(b_ * p_.gamma + i, probability);
  }
  bool record(int64_t i, const Acceptance& a) const {
    record_accept_prob(i, a.probability);
    return a.accepted;
  }

  ChainScratch& scratch_;
  int64_t num_drafts_ = 0;           // drafts to verify, as `find_drafts` counts them
  bool no_bonus_ = false;            // no bonus token may follow the last draft
  int32_t status_after_drafts_ = 0;  // reported if all drafts are accepted
  int32_t block_fault_ = 0;          // status of the row that ends a block early
};

}  // namespace specdec::cpu
