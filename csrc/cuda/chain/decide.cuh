#pragma once
// Decides which drafts of a sequence are accepted. One thread of each block runs the verifier. Work
// that needs all threads is an action: the verifier sets t_.action and returns, and `go_on` resumes
// it when the action is done. All blocks of a group make the same decisions. The same decisions as
// straight-line code are in csrc/cpu/chain/decide.cpp. Rule block is in block.cuh.
#include "cuda/chain/sequence.cuh"

namespace specdec::cuda {

class ChainVerifier {
 public:
  __device__ ChainVerifier(const ChainJob& job, ChainTask& task, int64_t context, unsigned rank)
      : job_(job), p_(job.p), t_(task), context_(context), rank_(rank) {}

  __device__ void begin() {
    t_.state = State::kInOrder;
    if (t_.nothing_to_verify) return finish();
    if (p_.rule != Rule::kBlock || t_.greedy) {
      const bool reads_single_entries =
          t_.direct && t_.num_drafts > 1 && p_.draft.form != DraftForm::kSparse;
      if (!reads_single_entries) return next_row(0);
      t_.action = Action::kCheckEntries;
      return;
    }
    t_.state = State::kBlockRows;
    t_.end = t_.num_drafts;
    row_record(0).p_scale = 1;
    t_.num_drafts > 0 ? open_row_and_draft(0) : search_from_end(0);
  }

  // Goes on after the action.
  __device__ void go_on() {
    if (t_.action == Action::kDraw) return drawn();
    if (t_.action == Action::kCheckEntries) {
      t_.accepted = static_cast<int32_t>(t_.accepted_ahead);
      return next_row(t_.accepted_ahead);
    }
    switch (t_.state) {
      case State::kInOrder:
        return t_.action == Action::kMeasure   ? decide_row()
               : t_.action == Action::kEntropy ? decide_typical()
                                               : after_residual();
      case State::kRejected:
        return draw_from_target();
      case State::kBlockRows:
        return record_row();
      case State::kBlockFromEnd:
        return decide_from_end();
      case State::kBlockFollow:
        return t_.action == Action::kMeasure ? draw_from_target() : after_residual();
    }
  }

  // Whether the ratio test accepts draft i of a direct target; with `emit`, writes an accepted one
  // to the outputs. Any thread may call this: the test reads one entry of the target row and one of
  // the draft row, so all drafts are tested at once.
  __device__ bool accepts_by_entry(int64_t i, bool emit) const {
    const int64_t x = drafted_token(p_, t_, i);
    DraftDistribution draft;
    open_draft(p_, t_, i, x, draft);
    const double p_x = x < p_.vocab ? at(target_row(p_, t_, i), x) : 0.0f;
    const Acceptance a = accept_ratio(accept_uniform(p_, t_, i), p_x, p_.lenience * draft.q_x);
    const bool accepted = !draft.invalid_at_token && p_x < INFINITY && a.accepted;
    if (accepted && emit) {
      record_accept_prob(i, a.probability);
      write(i, x, log_of(p_x));
    }
    return accepted;
  }

  // Looks up the drafted token of row i, which is opened next. Here and not where a row is opened,
  // because the kernel opens rows at many places.
  __device__ void look_ahead(int64_t i) const {
    t_.next_x = i < t_.num_drafts ? drafted_token(p_, t_, i) : -1;
  }

  // Has row i and its draft measured.
  __device__ void open_row_and_draft(int64_t i) {
    open_row(i);
    t_.x = t_.next_x;
    t_.has_entry = false;
    t_.reads_one_entry = t_.direct && t_.x >= 0;
    t_.has_draft = t_.x >= 0 && p_.reads_draft() && !t_.greedy;
    t_.prefilled = job_.plan.parallel;
    if (t_.has_draft) open_draft(p_, t_, i, t_.x, t_.draft);
    measure(!t_.prefilled && (!t_.reads_one_entry || (t_.has_draft && t_.draft.unmeasured())));
  }

 private:
  __device__ void open_row(int64_t i) {
    t_.i = i;
    t_.row = target_row(p_, t_, i);
    // Rows alternate between two sets of tile statistics: a block that is ahead fills one while
    // others still read the other. Barriers of the group separate fills, not rows, so a row whose
    // set was not filled leaves it to the next row.
    if (t_.stats_filled) t_.stats_buffer ^= 1;
    t_.stats_filled = false;
    const int64_t at =
        context_ * job_.context_tile_stats() + (job_.plan.parallel ? i : t_.stats_buffer);
    t_.tile_stats = job_.tile_stats_array[at];
    t_.draft_tile_stats = job_.tile_stats_array[at + job_.row_tile_stats()];
  }

  __device__ void measure(bool fills) {
    t_.fills = fills;
    t_.stats_filled |= fills;
    t_.action = Action::kMeasure;
  }

  __device__ void finish() { t_.action = Action::kDone; }

  __device__ void next_row(int64_t i) {
    if (i > t_.num_drafts || (i == t_.num_drafts && t_.no_bonus)) return finish();
    if (i == t_.num_drafts) t_.status |= t_.status_after_drafts;
    open_row_and_draft(i);
  }

  // Has the whole row measured, so that a token can be drawn from it.
  __device__ void measure_whole(State state) {
    open_row(t_.i);
    t_.x = -1;
    t_.reads_one_entry = t_.has_draft = t_.prefilled = false;
    t_.state = state;
    measure(true);
  }

  __device__ void decide_row() {
    const bool chooses = t_.greedy || p_.rule == Rule::kMatch;
    if (t_.x >= 0 && !chooses) read_entry();
    if (t_.reads_one_entry) check_entry();
    if (!t_.stats.valid) {
      t_.status |= kTargetInvalid;
      return finish();
    }
    if (chooses) return accept_target_token();
    if (t_.x < 0) return draw(false);
    if (p_.reads_draft()) return accepts_ratio() ? accept() : reject();
    if (p_.rule == Rule::kSynthetic) return accepts_at_rate() ? accept() : draw(false);
    const double p_x = exp_of(drafted_logprob());
    if (!typical_needs_entropy(p_x, p_.typical_epsilon)) return accept_or_draw(p_x > 0);
    t_.action = Action::kEntropy;
  }

  // Rule synthetic, at every temperature.
  __device__ bool accepts_at_rate() const {
    return record(accept_at_rate(accept_uniform(p_, t_, t_.i), p_.synthetic_rates[t_.i]));
  }

  __device__ void decide_typical() {
    accept_or_draw(exp_of(drafted_logprob()) >
                   typical_bound(p_.typical_epsilon, p_.typical_delta, t_.entropy));
  }

  __device__ void accept_or_draw(bool accepted) {
    record_accept_prob(t_.i, accepted);
    accepted ? accept() : draw(false);
  }

  // The target chose t_.token, by its maximum or by the shared noise.
  __device__ void accept_target_token() {
    bool accepted = t_.x == t_.token;
    if (p_.rule == Rule::kLenient && t_.x >= 0 && t_.x < p_.vocab) {
      accepted |=
          accept_near_maximum(at(t_.row, t_.x), t_.stats.max, p_.lenience, p_.kind == Kind::kProbs);
    }
    if (p_.rule == Rule::kSynthetic) {
      accepted = t_.x >= 0 && accepts_at_rate();
    } else if (t_.x >= 0) {
      record_accept_prob(t_.i, accepted);
    }
    write(t_.i, accepted ? t_.x : t_.token, t_.greedy ? 0.0 : target_logprob(t_.token));
    if (!accepted) return finish();
    ++t_.accepted;
    next_row(t_.i + 1);
  }

  __device__ bool accepts_ratio() const {
    if (t_.draft.invalid_at_token) return false;
    return record(accept_draft(t_.direct, accept_uniform(p_, t_, t_.i), t_.entry,
                               t_.direct ? -INFINITY : drafted_logprob(), p_.lenience, t_.draft));
  }

  __device__ bool record(const Acceptance& a) const {
    record_accept_prob(t_.i, a.probability);
    return a.accepted;
  }

  __device__ void accept() {
    write(t_.i, t_.x, drafted_logprob());
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
    t_.stats_filled |= t_.direct;
    t_.action = Action::kResidual;
  }

  // Draws from the residual; or from P if the draft row is not valid or the residual is empty.
  __device__ void after_residual() {
    if (!t_.stats.valid) {
      t_.status |= kTargetInvalid;
      return finish();
    }
    if (t_.valid && t_.positive > 0) return draw(true);
    t_.status |= t_.valid ? kEmptyResidual : kDraftInvalid;
    // Rule block has filled the tile statistics with those of another row since.
    t_.state == State::kBlockFollow ? measure_whole(State::kBlockFollow) : draw(false);
  }

  __device__ void draw_from_target() {
    if (!t_.stats.valid) {
      t_.status |= kTargetInvalid;
      return finish();
    }
    if (t_.state == State::kRejected) t_.status |= kDraftInvalid;
    draw(false);
  }

  __device__ void draw(bool residual) {
    t_.residual = residual;
    t_.action = Action::kDraw;
  }

  __device__ void drawn() {
    write(t_.i, t_.token, target_logprob(t_.token));
    finish();
  }

  // Rule block, in block.cuh.
  __device__ void record_row();
  __device__ void search_from_end(int64_t tau);
  __device__ void decide_from_end();
  __device__ bool accepts_block(double h) const;
  __device__ void restore_row(int64_t i);
  __device__ void end_block(bool residual_is_summed);

  __device__ void read_entry() {
    if (!t_.has_entry) t_.entry = t_.x < p_.vocab ? at(t_.row, t_.x) : 0;
  }

  // A direct row is read at the drafted token alone until that is rejected.
  __device__ void check_entry() {
    t_.stats = {};
    t_.stats.direct = true;
    t_.stats.valid = t_.entry < INFINITY;
  }

  __device__ double drafted_logprob() const {
    return t_.x < p_.vocab ? t_.stats.logprob(t_.entry) : -INFINITY;
  }

  __device__ double target_logprob(int64_t token) const {
    return cuda::target_logprob(t_.row, t_.stats, token);
  }

  __device__ void write(int64_t i, int64_t token, double logprob) const {
    if (rank_ != 0) return;
    const int64_t at = t_.b * (p_.gamma + 1) + i;
    put_id(p_.tokens, p_.ids_are_int64, at, token);
    if (p_.logprobs != nullptr) p_.logprobs[at] = static_cast<float>(logprob);
  }

  __device__ void record_accept_prob(int64_t i, double probability) const {
    cuda::record_accept_prob(p_, rank_, t_.b * p_.gamma + i, probability);
  }

  __device__ ChainRecord& row_record(int64_t i) const {
    return job_.records[(context_ * job_.plan.group_size + rank_) * (p_.gamma + 1) + i];
  }

  const ChainJob& job_;
  const ChainParams& p_;
  ChainTask& t_;
  const int64_t context_;
  const unsigned rank_;
};

}  // namespace specdec::cuda
