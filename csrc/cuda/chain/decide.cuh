#pragma once
// Decides which drafts of a sequence are accepted, by one thread of each block. What needs all
// threads it leaves to the actions: it sets t_.action, and goes on when that is done. Every block
// of a group decides by itself and alike. csrc/cpu/chain/decide.cpp does the same without the
// detours.
#include "cuda/chain/sequence.cuh"
#include "specdec/acceptance.h"

namespace specdec::cuda {

class ChainVerifier {
 public:
  __device__ ChainVerifier(const ChainJob& job, ChainTask& task, int64_t context, unsigned rank)
      : job_(job), p_(job.p), t_(task), context_(context), rank_(rank) {}

  __device__ void begin() {
    t_.state = State::kInOrder;
    if (t_.over) return finish();
    if (p_.rule != Rule::kBlock || t_.greedy) {
      const bool by_entries = t_.direct && t_.drafts > 1 && p_.draft.form != DraftForm::kSparse;
      if (!by_entries) return next_row(0);
      t_.action = Action::kCheckEntries;
      return;
    }
    t_.state = State::kBlockRows;
    t_.end = t_.drafts;
    record(0).carried = 1;
    t_.drafts > 0 ? open_row_and_draft(0) : look_back(0);
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
        return decide_back();
      case State::kBlockFollow:
        return t_.action == Action::kMeasure ? draw_from_target() : after_residual();
    }
  }

  // Whether the ratio test accepts draft i of a direct target; `emit` writes it to the outputs. Any
  // thread may call this: the test reads one entry of one row, so all drafts are tested at once.
  __device__ bool accepts_by_entry(int64_t i, bool emit) const {
    const int64_t x = p_.drafted(t_.b, i);
    DraftDistribution draft;
    open_draft(p_, t_, i, x, draft);
    const double p_x = x < p_.vocab ? at(target_row(i), x) : 0.0f;
    const Acceptance a = accept_ratio(accept_uniform(p_, t_, i), p_x, lenience() * draft.q_x);
    const bool accepted = !draft.fault && p_x < INFINITY && a.accepted;
    if (accepted && emit) {
      record_accept_prob(i, a.probability);
      write(i, x, log(p_x));
    }
    return accepted;
  }

  // Has row i and its draft measured.
  __device__ void open_row_and_draft(int64_t i) {
    open_row(i);
    t_.x = i < t_.drafts ? p_.drafted(t_.b, i) : -1;
    t_.one_entry = t_.direct && t_.x >= 0;
    t_.has_draft = t_.x >= 0 && p_.reads_draft() && !t_.greedy;
    t_.prefilled = job_.plan.parallel;
    if (t_.has_draft) open_draft(p_, t_, i, t_.x, t_.draft);
    measure(!t_.prefilled && (!t_.one_entry || (t_.has_draft && t_.draft.unmeasured())));
  }

 private:
  __device__ RowView target_row(int64_t i) const {
    const Read read = p_.kind == Kind::kLogits ? Read::kLogits
                      : t_.direct || t_.greedy ? Read::kProbs
                                               : Read::kLogOfProbs;
    const TargetRow at = specdec::target_row(p_, t_, i);
    return RowView(p_.target, at.sequence, at.row, p_.vocab, read);
  }

  __device__ void open_row(int64_t i) {
    t_.i = i;
    t_.row = target_row(i);
    // Two sets of tile statistics take turns: a block that is ahead fills one while others still
    // read the other. There is a barrier of the group between two fills but not always between two
    // rows, so a set that was not filled is kept.
    if (t_.used) t_.turn ^= 1;
    t_.used = false;
    const int64_t at = context_ * job_.context_tile_stats() + (job_.plan.parallel ? i : t_.turn);
    t_.tile_stats = job_.tile_stats_array[at];
    t_.draft_tile_stats = job_.tile_stats_array[at + job_.row_tile_stats()];
  }

  __device__ void measure(bool fills) {
    t_.fills = fills;
    t_.used |= fills;
    t_.action = Action::kMeasure;
  }

  __device__ void finish() { t_.action = Action::kDone; }

  __device__ void next_row(int64_t i) {
    if (i > t_.drafts || (i == t_.drafts && t_.ends)) return finish();
    if (i == t_.drafts) t_.status |= t_.after_drafts;
    open_row_and_draft(i);
  }

  // Has the whole row measured, so that a token can be drawn from it.
  __device__ void measure_whole(State state) {
    open_row(t_.i);
    t_.x = -1;
    t_.one_entry = t_.has_draft = t_.prefilled = false;
    t_.state = state;
    measure(true);
  }

  __device__ void decide_row() {
    if (t_.one_entry) look_up_target();
    if (!t_.stats.valid) {
      t_.status |= kTargetInvalid;
      return finish();
    }
    if (t_.greedy || p_.rule == Rule::kMatch) return compare();
    if (t_.x < 0) return draw(false);
    if (p_.reads_draft()) return accepts() ? accept() : reject();
    if (p_.rule == Rule::kSynthetic) return at_its_rate() ? accept() : draw(false);
    const double p_x = exp(target_logprob(t_.x));
    if (!typical_needs_entropy(p_x, p_.typical_epsilon)) return typical(p_x > 0);
    t_.action = Action::kEntropy;
  }

  // Rule synthetic, at every temperature.
  __device__ bool at_its_rate() const {
    return decide(accept_at_rate(accept_uniform(p_, t_, t_.i), p_.synthetic_rates[t_.i]));
  }

  __device__ void decide_typical() {
    typical(exp(target_logprob(t_.x)) >
            typical_bound(p_.typical_epsilon, p_.typical_delta, t_.entropy));
  }

  __device__ void typical(bool accepted) {
    record_accept_prob(t_.i, accepted);
    accepted ? accept() : draw(false);
  }

  // The target chose t_.token, by its maximum or by the shared noise.
  __device__ void compare() {
    bool accepted = t_.x == t_.token;
    if (p_.rule == Rule::kLenient && t_.x >= 0 && t_.x < p_.vocab) {
      accepted |=
          accept_near_maximum(at(t_.row, t_.x), t_.stats.max, p_.lenience, p_.kind == Kind::kProbs);
    }
    if (p_.rule == Rule::kSynthetic) {
      accepted = t_.x >= 0 && at_its_rate();
    } else if (t_.x >= 0) {
      record_accept_prob(t_.i, accepted);
    }
    write(t_.i, accepted ? t_.x : t_.token, t_.greedy ? 0.0 : target_logprob(t_.token));
    if (!accepted) return finish();
    ++t_.accepted;
    next_row(t_.i + 1);
  }

  __device__ bool accepts() const {
    const DraftDistribution& draft = t_.draft;
    if (draft.fault) return false;
    const double u = accept_uniform(p_, t_, t_.i), l = lenience();
    if (t_.direct) {
      return decide(accept_ratio(u, t_.x < p_.vocab ? at(t_.row, t_.x) : 0.0f, l * draft.q_x));
    }
    return decide(accept_log_ratio(u, target_logprob(t_.x), log(l) + draft.log_q_x));
  }

  __device__ bool decide(const Acceptance& a) const {
    record_accept_prob(t_.i, a.probability);
    return a.accepted;
  }

  __device__ void accept() {
    write(t_.i, t_.x, target_logprob(t_.x));
    ++t_.accepted;
    next_row(t_.i + 1);
  }

  __device__ void reject() {
    if (!t_.draft.fault) return subtract(1.0);
    t_.valid = false;
    t_.one_entry ? measure_whole(State::kRejected) : after_residual();
  }

  __device__ void subtract(double c) {
    t_.c = c;
    t_.used |= t_.direct;
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
    // In rule block the tile statistics are another row's by now.
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

  // Rule block (Sun et al. 2024) accepts the first tau drafts, the largest tau with u < h_tau.
  // First it records every drafted row. A faulty row ends the block before it, as if nothing had
  // been drafted from there on.
  __device__ void record_row() {
    const int64_t i = t_.i;
    if (t_.one_entry) look_up_target();
    t_.fault = !t_.stats.valid ? kTargetInvalid : t_.draft.fault ? kDraftInvalid : 0;
    if (t_.fault != 0) {
      t_.end = i;
      return look_back(i);
    }
    ChainRecord& now = record(i);
    now.stats = t_.stats;
    now.draft = t_.draft;
    now.logprob = target_logprob(t_.x);
    double ratio = 0;
    if (t_.x < p_.vocab) {
      ratio = t_.direct ? probability_ratio(at(t_.row, t_.x), t_.draft.q_x)
                        : probability_ratio_of_logs(now.logprob, t_.draft.log_q_x);
    }
    record(i + 1).carried = next_carried(now.carried, ratio);
    i + 1 < t_.drafts ? open_row_and_draft(i + 1) : look_back(i + 1);
  }

  // Then it looks for tau from the end, so that only the rows beyond it are read twice.
  __device__ void look_back(int64_t tau) {
    t_.tau = tau;
    for (; t_.tau > 0; --t_.tau) {
      const double c = record(t_.tau).carried;
      if (t_.tau < t_.end) {
        t_.state = State::kBlockFromEnd;
        take_record(t_.tau);
        return subtract(c);
      }
      if (accepts_block(c)) break;
    }
    end_block(false);
  }

  __device__ void decide_back() {
    double h = t_.c;
    t_.fault = !t_.stats.valid ? kTargetInvalid : t_.valid ? 0 : kDraftInvalid;
    if (t_.fault != 0) {
      t_.end = t_.tau;
    } else {
      h = block_accept_prob(t_.c, t_.positive, t_.negative);
    }
    accepts_block(h) ? end_block(true) : look_back(t_.tau - 1);
  }

  __device__ bool accepts_block(double h) const {
    record_accept_prob(t_.tau - 1, h);
    return block_accept_uniform(p_, t_, t_.tau - 1) < h;
  }

  __device__ void take_record(int64_t i) {
    open_row(i);
    t_.stats = record(i).stats;
    t_.draft = record(i).draft;
  }

  // known: the residual of row tau was the last action.
  __device__ void end_block(bool known) {
    const int64_t tau = t_.tau;
    t_.accepted = static_cast<int32_t>(tau);
    for (int64_t i = 0; i < tau; ++i) write(i, p_.drafted(t_.b, i), record(i).logprob);
    t_.state = State::kBlockFollow;
    if (tau == t_.end) {
      if (t_.fault == 0 && t_.ends) return finish();
      t_.status |= t_.fault != 0 ? t_.fault : t_.after_drafts;
      if (t_.fault == kTargetInvalid) return finish();
      t_.i = tau;
      measure_whole(State::kBlockFollow);
      // The tile statistics of a bonus row have not been overwritten.
      t_.prefilled = job_.plan.parallel && tau == t_.drafts;
      t_.fills = !t_.prefilled;
      return;
    }
    if (known && !looks_up_few()) return after_residual();
    take_record(tau);
    subtract(record(tau).carried);
  }

 public:
  // Whether rule block computes h from a few lookups instead of a pass over the row.
  __device__ bool looks_up_few() const { return t_.draft.few() && !t_.direct; }

  __device__ double lenience() const { return p_.rule == Rule::kLenient ? p_.lenience : 1.0; }

 private:
  // A direct row is read at the drafted token alone until that is rejected.
  __device__ void look_up_target() {
    const float value = t_.x < p_.vocab ? at(t_.row, t_.x) : 0;
    t_.stats = {};
    t_.stats.direct = true;
    t_.stats.valid = value < INFINITY;
  }

  __device__ double target_logprob(int64_t token) const {
    return token < p_.vocab ? t_.stats.logprob(at(t_.row, token)) : -INFINITY;
  }

  __device__ void write(int64_t i, int64_t token, double logprob) const {
    if (rank_ != 0) return;
    const int64_t at = t_.b * (p_.gamma + 1) + i;
    put_id(p_.tokens, p_.ids_are_int64, at, token);
    if (p_.logprobs != nullptr) p_.logprobs[at] = static_cast<float>(logprob);
  }

  __device__ void record_accept_prob(int64_t i, double probability) const {
    if (rank_ != 0 || p_.accept_probs == nullptr) return;
    p_.accept_probs[t_.b * p_.gamma + i] = recorded_accept_prob(probability);
  }

  __device__ ChainRecord& record(int64_t i) const {
    return job_.records[(context_ * job_.plan.group_size + rank_) * (p_.gamma + 1) + i];
  }

  const ChainJob& job_;
  const ChainParams& p_;
  ChainTask& t_;
  const int64_t context_;
  const unsigned rank_;
};

}  // namespace specdec::cuda
