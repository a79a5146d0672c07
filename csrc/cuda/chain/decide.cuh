#pragma once
// Decides which drafts of a sequence are accepted. One thread of each block runs the verifier. Work
// that needs all threads is an action: the verifier sets t_.action and returns, and `go_on` resumes
// it when the action is done. All blocks of a group make the same decisions. The same decisions as
// straight-line code are in csrc/cpu/chain/decide.cpp. Here are the rules that the target's choice
// or the ratio test decides; the others are in rules.cuh and block.cuh.
#include "cuda/chain/view.cuh"

namespace specdec::cuda {

template <Variant kVariant>
class ChainVerifier : ChainView<kVariant> {
  SPECDEC_CHAIN_VIEW(kVariant);

 public:
  __device__ ChainVerifier(const ChainJob& job, ChainTask& task) : View(job, task) {}

  // Decides on what the action has found, and sets the next one. The kernel calls this at one
  // place, and rows are opened at one place: what is inlined twice makes it larger.
  __device__ void go_on() {
    t_.next_row = kNone;
    t_.next_whole = false;
    if (t_.action == Action::kMeasure && !t_.filling) take_measured();
    t_.filling ? fill() : decide();
    if (t_.next_row != kNone) open_row_and_draft();
  }

  // Tests all drafts, one in each lane, and writes those before the first that is not accepted, and
  // the acceptance probability of that one. For one warp.
  __device__ void test_drafts() const {
    if (!tests_side_by_side()) return;
    int64_t first = 0;
    int accepted;
#pragma unroll 1
    do {
      const int64_t i = first + lane_id();
      Acceptance a = {false, NAN};
      double logprob = 0;
      if (i < t_.num_drafts) a = test_draft(i, logprob);
      const unsigned others = ~__ballot_sync(kAllLanes, a.accepted);
      accepted = others == 0 ? kLanes : __ffs(static_cast<int>(others)) - 1;
      // A test that did not take place has no probability.
      if (lane_id() <= accepted && a.probability >= 0) {
        record_accept_prob(i, a.probability);
      }
      if (lane_id() < accepted) write(i, drafted_token(p_, t_, i), logprob);
      first += accepted;
    } while (accepted == kLanes);
    if (lane_id() == 0) t_.accepted_ahead = first;
  }

 private:
  static constexpr int64_t kNone = -1;

  // The test of draft i, from the statistics of its rows if all were measured, else from single
  // entries of the target row and of the draft row.
  __device__ Acceptance test_draft(int64_t i, double& logprob) const {
    const int64_t x = drafted_token(p_, t_, i);
    MeasuredRow target = {};
    if (kVariant == Variant::kLogits || t_.all_measured) {
      target = *measured_row(i, kTarget);
    } else {
      // Read as it is and before Q, so that both loads are under way.
      RowView row = target_row(p_, t_, i);
      row.read = Read::kLogits;
      target.entry = x < p_.vocab ? at(row, x) : 0;
      target.stats = entry_stats(target.entry);
    }
    if (!target.stats.valid) return {false, NAN};
    if (t_.greedy) {
      const bool accepted = is_chosen(x, target);
      return {accepted, accepted ? 1.0 : 0.0};
    }
    DraftDistribution draft;
    open_draft(i, x, draft);
    if (draft.unmeasured()) set_measured(*measured_row(i, kDraft), draft);
    if (draft.invalid_at_token) return {false, NAN};
    logprob = x < p_.vocab ? target.stats.logprob(target.entry) : -INFINITY;
    return accept_draft(direct(), accept_uniform(p_, t_, i), target.entry, logprob, p_.lenience,
                        draft);
  }

  // Row-parallel: what a group does before the last one decides.
  __device__ void fill() {
    const bool begins = t_.state == State::kBegin;
    t_.state = State::kInOrder;
    if (t_.nothing_to_verify) return finish();
    const int64_t row = t_.own_row;
    const bool exists = row < t_.num_drafts || (row == t_.num_drafts && !t_.no_bonus);
    if (begins && exists) return open_next(row);
    finish();
  }

  __device__ void decide() {
    if (t_.state == State::kBegin) return begin();
    if (t_.action == Action::kChoose) return draw();
    if (t_.action == Action::kDraw) return drawn();
    if (t_.action == Action::kTestDrafts) return follow_tests();
    if (t_.state == State::kRejected) return draw_from_target();
    if constexpr (kGeneral) {
      if (t_.state == State::kBlockRows) return record_row();
      if (t_.state == State::kBlockFromEnd) return decide_from_end();
      if (t_.state == State::kBlockFollow && t_.action == Action::kMeasure) {
        return draw_from_target();
      }
      if (t_.action == Action::kEntropy) return decide_typical();
      if (t_.action == Action::kCount) {
        // A sum of ones, which scales may have rounded.
        return decide_top_beta(t_.found + 0.5 < static_cast<double>(p_.top_beta_rank));
      }
    }
    t_.action == Action::kMeasure ? decide_row() : after_residual();
  }

  __device__ void begin() {
    if (t_.all_measured && t_.action != Action::kMeasureAll) {
      t_.action = Action::kMeasureAll;
      return;
    }
    t_.state = State::kInOrder;
    if (t_.nothing_to_verify) return finish();
    if (rule_is(Rule::kBlock) && !t_.greedy) {
      t_.state = State::kBlockRows;
      t_.end = t_.num_drafts;
      row_record(0).p_scale = 1;
      return t_.num_drafts > 0 ? open_next(0) : search_from_end(0);
    }
    if (!tests_side_by_side()) return next_row(0);
    if (t_.all_measured) return follow_tests();
    t_.action = Action::kTestDrafts;
  }

  // The leading drafts that were accepted side by side have been written.
  __device__ void follow_tests() {
    t_.accepted = static_cast<int32_t>(t_.accepted_ahead);
    next_row(t_.accepted_ahead);
  }

  // Has row t_.next_row and its draft measured.
  __device__ void open_row_and_draft() {
    const int64_t i = t_.next_row;
    open_row(i);
    t_.x = i < t_.num_drafts && !t_.next_whole ? drafted_token(p_, t_, i) : -1;
    t_.has_entry = false;
    t_.reads_one_entry = direct() && t_.x >= 0;
    t_.has_draft = t_.x >= 0 && reads_draft() && !t_.greedy;
    t_.prefilled = job_.plan.parallel && !t_.filling && !t_.next_whole;
    if (t_.has_draft) open_draft(i, t_.x, t_.draft);
    t_.fills = !t_.prefilled && (!t_.reads_one_entry || (t_.has_draft && t_.draft.unmeasured()));
    t_.stats_filled |= t_.fills;
    t_.action = Action::kMeasure;
  }

  // Takes over what was measured of the current row and of its draft.
  __device__ void take_measured() {
    if (measures(kTarget)) {
      const MeasuredRow& target = measured(kTarget);
      t_.stats = target.stats;
      t_.token = target.token;
      t_.entry = target.entry;
      t_.has_entry = true;
    }
    if (measures(kDraft)) set_measured(measured(kDraft), t_.draft);
  }
  static __device__ void set_measured(const MeasuredRow& measured, DraftDistribution& draft) {
    draft.row_checked = measured.stats.valid;
    draft.set(measured.stats, &measured.entry);
  }
  __device__ const MeasuredRow& measured(int which) const {
    return knows_row() ? *measured_row(t_.i, which) : t_.measured[which];
  }

  __device__ void open_next(int64_t i) { t_.next_row = i; }

  // Opens row i.
  __device__ void open_row(int64_t i) {
    t_.i = i;
    t_.row = target_row(p_, t_, i);
    // Rows alternate between two sets of tile statistics: a block that is ahead fills one while
    // others still read the other. Barriers of the group separate fills, not rows, so a row whose
    // set was not filled leaves it to the next row.
    if (t_.stats_filled) t_.stats_buffer ^= 1;
    t_.stats_filled = false;
    const int64_t at =
        t_.context * job_.context_tile_stats() + (job_.plan.parallel ? i : t_.stats_buffer);
    t_.tile_stats = job_.tile_stats_array[at];
    t_.draft_tile_stats = job_.tile_stats_array[at + job_.row_tile_stats()];
  }

  __device__ void finish() { t_.action = Action::kDone; }

  __device__ void next_row(int64_t i) {
    if (i > t_.num_drafts || (i == t_.num_drafts && t_.no_bonus)) return finish();
    if (i == t_.num_drafts) t_.status |= t_.status_after_drafts;
    open_next(i);
  }

  // Has the whole row measured, so that a token can be drawn from it.
  __device__ void measure_whole(State state) {
    open_next(t_.i);
    t_.next_whole = true;
    t_.state = state;
  }

  __device__ void decide_row() {
    const bool chooses = t_.greedy || rule_is(Rule::kMatch);
    if (t_.x >= 0 && !chooses) read_entry();
    if (t_.reads_one_entry) check_entry();
    if (!t_.stats.valid) {
      t_.status |= kTargetInvalid;
      return finish();
    }
    if (rule_is(Rule::kTopBeta) && t_.x >= 0) return begin_top_beta();
    if (chooses) return accept_target_token();
    if (t_.x < 0) return draw_p();
    !kGeneral || reads_draft() ? decide_by_ratio() : decide_otherwise();
  }

  __device__ void decide_by_ratio() {
    // The first draft that was not accepted side by side with the others.
    if (kVariant == Variant::kProbs || tests_side_by_side()) return reject();
    const double logprob = drafted_logprob();
    accepts_ratio(logprob) ? accept(logprob) : reject();
  }

  // The target chose t_.token, by its maximum or by the shared noise.
  __device__ void accept_target_token() {
    bool accepted = is_chosen(t_.x, {t_.stats, t_.entry, t_.token});
    if (rule_is(Rule::kSynthetic)) {
      accepted = t_.x >= 0 && accepts_at_rate();
    } else if (t_.x >= 0) {
      record_accept_prob(t_.i, accepted);
    }
    write(t_.i, accepted ? t_.x : t_.token, t_.greedy ? 0.0 : target_logprob(t_.token));
    if (!accepted) return finish();
    ++t_.accepted;
    next_row(t_.i + 1);
  }

  // Whether the target chose x, or rule lenient takes x for it.
  __device__ bool is_chosen(int64_t x, const MeasuredRow& target) const {
    return x == target.token || (rule_is(Rule::kLenient) && x >= 0 && x < p_.vocab &&
                                 accept_near_maximum(target.entry, target.stats.max, p_.lenience,
                                                     p_.kind == Kind::kProbs));
  }

  __device__ bool accepts_ratio(double logprob) const {
    if (t_.draft.invalid_at_token) return false;
    return record(accept_draft(direct(), accept_uniform(p_, t_, t_.i), t_.entry, logprob,
                               p_.lenience, t_.draft));
  }

  __device__ bool record(const Acceptance& a) const {
    record_accept_prob(t_.i, a.probability);
    return a.accepted;
  }

  __device__ void accept(double logprob) {
    write(t_.i, t_.x, logprob);
    ++t_.accepted;
    next_row(t_.i + 1);
  }

  __device__ void reject() {
    if (!t_.draft.invalid_at_token) return subtract(1.0);
    t_.valid = false;
    t_.reads_one_entry ? measure_whole(State::kRejected) : after_residual();
  }

  __device__ void subtract(double c) {
    t_.c = c;
    t_.stats_filled |= direct();
    t_.action = Action::kResidual;
  }

  // Draws from the residual; or from P if the draft row is not valid or the residual is empty.
  __device__ void after_residual() {
    if (!t_.stats.valid) {
      t_.status |= kTargetInvalid;
      return finish();
    }
    t_.residual = t_.valid && t_.positive > 0;
    if (t_.residual) return draw();
    t_.status |= t_.valid ? kEmptyResidual : kDraftInvalid;
    // Rule block has filled the tile statistics with those of another row since.
    t_.state == State::kBlockFollow ? measure_whole(State::kBlockFollow) : draw_p();
  }

  __device__ void draw_from_target() {
    if (!t_.stats.valid) {
      t_.status |= kTargetInvalid;
      return finish();
    }
    if (t_.state == State::kRejected) t_.status |= kDraftInvalid;
    draw_p();
  }

  __device__ void draw_p() {
    t_.residual = false;
    t_.action = Action::kChoose;
  }

  __device__ void draw() { t_.action = Action::kDraw; }

  __device__ void drawn() {
    write(t_.i, t_.token, target_logprob(t_.token));
    finish();
  }

  // Rules that test a draft by P alone or not at all, in rules.cuh.
  __device__ void decide_otherwise();
  __device__ bool accepts_at_rate() const;
  __device__ void decide_typical();
  __device__ void begin_top_beta();
  __device__ void decide_top_beta(bool accepted);
  __device__ void accept_or_draw(bool accepted);

  // Rule block, in block.cuh.
  __device__ void record_row();
  __device__ void search_from_end(int64_t tau);
  __device__ void decide_from_end();
  __device__ bool accepts_block(double h) const;
  __device__ void restore_row(int64_t i);
  __device__ void end_block(bool residual_is_summed);

  __device__ void read_entry() {
    if (!t_.has_entry) t_.entry = t_.x < p_.vocab ? call_at<Reads>(t_.row, t_.x) : 0;
  }

  // A direct row is read at the drafted token alone until that is rejected.
  __device__ void check_entry() { t_.stats = entry_stats(t_.entry); }
  static __device__ RowStats entry_stats(float entry) {
    RowStats stats = {};
    stats.direct = true;
    stats.valid = entry < INFINITY;
    return stats;
  }

  __device__ double drafted_logprob() const {
    return t_.x < p_.vocab ? t_.stats.logprob(t_.entry) : -INFINITY;
  }

  __device__ double target_logprob(int64_t token) const {
    return token < p_.vocab ? t_.stats.logprob(call_at<Reads>(t_.row, token)) : -INFINITY;
  }

  __device__ void write(int64_t i, int64_t token, double logprob) const {
    if (!t_.writes) return;
    const int64_t at = t_.b * (p_.gamma + 1) + i;
    put_id(p_.tokens, p_.ids_are_int64, at, token);
    if (p_.logprobs != nullptr) p_.logprobs[at] = static_cast<float>(logprob);
  }

  __device__ void record_accept_prob(int64_t i, double probability) const {
    if (!t_.writes) return;
    cuda::record_accept_prob(p_, t_.rank, t_.b * p_.gamma + i, probability);
  }

  __device__ ChainRecord& row_record(int64_t i) const {
    return job_.records[(t_.context * job_.plan.group_size + t_.rank) * (p_.gamma + 1) + i];
  }
};

}  // namespace specdec::cuda
