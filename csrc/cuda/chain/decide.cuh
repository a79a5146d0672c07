#pragma once
// The verdicts, by one thread of each block; csrc/cpu/chain.cpp says the same in one piece.
#include "cuda/chain/sequence.cuh"
#include "specdec/acceptance.h"

namespace specdec::cuda {

class Judge {
 public:
  // `context`: which slots and records this group has.
  __device__ Judge(const ChainJob& job, ChainTask& task, int64_t context, unsigned rank)
      : job_(job), p_(job.p), t_(task), context_(context), rank_(rank) {}

  __device__ void begin() {
    t_.state = State::kWalk;
    if (t_.over) return finish();
    if (p_.rule != Rule::kBlock || t_.greedy) {
      const bool touch = t_.direct && t_.drafts > 1 && p_.draft.form != DraftForm::kSparse;
      if (!touch) return next_row(0);
      t_.action = Action::kTouch;
      return;
    }
    t_.state = State::kBlockRows;
    t_.end = t_.drafts;
    record(0).carried = 1;
    t_.drafts > 0 ? take_row(0) : walk_back(0);
  }

  // After the action.
  __device__ void go_on() {
    if (t_.action == Action::kDraw) return drawn();
    if (t_.action == Action::kTouch) {
      t_.accepted = static_cast<int32_t>(t_.touched);
      return next_row(t_.touched);
    }
    switch (t_.state) {
      case State::kWalk:
        return t_.action == Action::kMeasure   ? judge_row()
               : t_.action == Action::kEntropy ? likely()
                                               : after_difference();
      case State::kRejected:
        return draw_from_target();
      case State::kBlockRows:
        return record_row();
      case State::kBlockBack:
        return judge_back();
      case State::kBlockFollow:
        return t_.action == Action::kMeasure ? draw_from_target() : after_difference();
    }
  }

  // Whether draft i stands, of given probabilities; `emit` writes it. For any thread: a row that is
  // judged at one entry needs no other row's verdict, so all of them are judged at once.
  __device__ bool touch(int64_t i, bool emit) const {
    const int64_t x = p_.drafted(t_.b, i);
    DraftDistribution draft;
    open_draft(p_, t_, i, x, draft);
    const double p_x = x < p_.vocab ? at(target_row(i), x) : 0.0f;
    const Acceptance a = accept_ratio(accept_uniform(p_, t_, i), p_x, lenience() * draft.q_x);
    const bool stands = !draft.fault && p_x < INFINITY && a.accepted;
    if (stands && emit) {
      record_accept_prob(i, a.probability);
      write(i, x, log(p_x));
    }
    return stands;
  }

  // Row i and its draft, to be measured.
  __device__ void take_row(int64_t i) {
    open_row(i);
    t_.x = i < t_.drafts ? p_.drafted(t_.b, i) : -1;
    t_.gather = t_.direct && t_.x >= 0;
    t_.has_draft = t_.x >= 0 && p_.reads_draft() && !t_.greedy;
    t_.prefilled = job_.plan.parallel;
    if (t_.has_draft) open_draft(p_, t_, i, t_.x, t_.draft);
    measure(!t_.prefilled && (!t_.gather || (t_.has_draft && t_.draft.unmeasured())));
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
    // A block that is ahead fills one slot while others still read the other. Between two fills is
    // a barrier of the group; between two rows need not be, so a slot that was not filled stays.
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
    if (i > t_.drafts || (i == t_.drafts && t_.cut)) return finish();
    if (i == t_.drafts) t_.status |= t_.missing;
    take_row(i);
  }

  // The whole row again, to draw from it.
  __device__ void measure_whole(State state) {
    open_row(t_.i);
    t_.x = -1;
    t_.gather = t_.has_draft = t_.prefilled = false;
    t_.state = state;
    measure(true);
  }

  __device__ void judge_row() {
    if (t_.gather) look_up_target();
    if (!t_.stats.valid) {
      t_.status |= kTargetNotFinite;
      return finish();
    }
    if (t_.greedy || p_.rule == Rule::kMatch) return compare();
    if (t_.x < 0) return draw(false);
    if (p_.reads_draft()) return accepts() ? stand() : reject();
    if (p_.rule == Rule::kSynthetic) return at_its_rate() ? stand() : draw(false);
    const double p_x = exp(target_logprob(t_.x));
    if (!typical_needs_entropy(p_x, p_.typical_epsilon)) return typical(p_x > 0);
    t_.action = Action::kEntropy;
  }

  // Rule synthetic, at every temperature.
  __device__ bool at_its_rate() const {
    return decide(accept_at_rate(accept_uniform(p_, t_, t_.i), p_.synthetic_rates[t_.i]));
  }

  __device__ void likely() {
    typical(exp(target_logprob(t_.x)) >
            typical_bound(p_.typical_epsilon, p_.typical_delta, t_.entropy));
  }

  __device__ void typical(bool stands) {
    record_accept_prob(t_.i, stands);
    stands ? stand() : draw(false);
  }

  // The target says t_.token, by its maximum or by shared noise.
  __device__ void compare() {
    bool stands = t_.x == t_.token;
    if (p_.rule == Rule::kLenient && t_.x >= 0 && t_.x < p_.vocab) {
      stands |=
          accept_near_maximum(at(t_.row, t_.x), t_.stats.max, p_.lenience, p_.kind == Kind::kProbs);
    }
    if (p_.rule == Rule::kSynthetic) {
      stands = t_.x >= 0 && at_its_rate();
    } else if (t_.x >= 0) {
      record_accept_prob(t_.i, stands);
    }
    write(t_.i, stands ? t_.x : t_.token, t_.greedy ? 0.0 : target_logprob(t_.token));
    if (!stands) return finish();
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

  __device__ void stand() {
    write(t_.i, t_.x, target_logprob(t_.x));
    ++t_.accepted;
    next_row(t_.i + 1);
  }

  __device__ void reject() {
    if (!t_.draft.fault) return subtract(1.0);
    t_.valid = false;
    t_.gather ? measure_whole(State::kRejected) : after_difference();
  }

  __device__ void subtract(double c) {
    t_.c = c;
    t_.used |= t_.direct;
    t_.action = Action::kDifference;
  }

  // Y ~ norm(max(cP - lQ, 0)), or ~ P where there is nothing to subtract or nothing left.
  __device__ void after_difference() {
    if (!t_.stats.valid) {
      t_.status |= kTargetNotFinite;
      return finish();
    }
    if (t_.valid && t_.more > 0) return draw(true);
    t_.status |= t_.valid ? kEmptyResidual : kDraftNotFinite;
    // In rule block the slot is another row's by now.
    t_.state == State::kBlockFollow ? measure_whole(State::kBlockFollow) : draw(false);
  }

  __device__ void draw_from_target() {
    if (!t_.stats.valid) {
      t_.status |= kTargetNotFinite;
      return finish();
    }
    if (t_.state == State::kRejected) t_.status |= kDraftNotFinite;
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

  // Rule block (Sun et al. 2024): the last i with u < h_i, from the end; only the rows that it
  // passes are scanned. A faulty row ends the block before it, as if nothing had been drafted from
  // there on.
  __device__ void record_row() {
    const int64_t i = t_.i;
    if (t_.gather) look_up_target();
    t_.fault = !t_.stats.valid ? kTargetNotFinite : t_.draft.fault ? kDraftNotFinite : 0;
    if (t_.fault != 0) {
      t_.end = i;
      return walk_back(i);
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
    i + 1 < t_.drafts ? take_row(i + 1) : walk_back(i + 1);
  }

  __device__ void walk_back(int64_t tau) {
    t_.tau = tau;
    for (; t_.tau > 0; --t_.tau) {
      const double c = record(t_.tau).carried;
      if (t_.tau < t_.end) {
        t_.state = State::kBlockBack;
        take_record(t_.tau);
        return subtract(c);
      }
      if (stops_at(c)) break;
    }
    end_block(false);
  }

  __device__ void judge_back() {
    double h = t_.c;
    t_.fault = !t_.stats.valid ? kTargetNotFinite : t_.valid ? 0 : kDraftNotFinite;
    if (t_.fault != 0) {
      t_.end = t_.tau;
    } else {
      h = block_accept_prob(t_.c, t_.more, t_.less);
    }
    stops_at(h) ? end_block(true) : walk_back(t_.tau - 1);
  }

  __device__ bool stops_at(double h) const {
    record_accept_prob(t_.tau - 1, h);
    return block_accept_uniform(p_, t_, t_.tau - 1) < h;
  }

  __device__ void take_record(int64_t i) {
    open_row(i);
    t_.stats = record(i).stats;
    t_.draft = record(i).draft;
  }

  // known: the difference at row tau was the last action.
  __device__ void end_block(bool known) {
    const int64_t tau = t_.tau;
    t_.accepted = static_cast<int32_t>(tau);
    for (int64_t i = 0; i < tau; ++i) write(i, p_.drafted(t_.b, i), record(i).logprob);
    t_.state = State::kBlockFollow;
    if (tau == t_.end) {
      if (t_.fault == 0 && t_.cut) return finish();
      t_.status |= t_.fault != 0 ? t_.fault : t_.missing;
      if (t_.fault == kTargetNotFinite) return finish();
      t_.i = tau;
      measure_whole(State::kBlockFollow);
      // Nothing has touched the slot of a bonus row.
      t_.prefilled = job_.plan.parallel && tau == t_.drafts;
      t_.fills = !t_.prefilled;
      return;
    }
    if (known && !scans_less()) return after_difference();
    take_record(tau);
    subtract(record(tau).carried);
  }

 public:
  // Rule block on the way back: whether a few lookups replace the scan.
  __device__ bool scans_less() const { return t_.draft.few() && !t_.direct; }

  __device__ double lenience() const { return p_.rule == Rule::kLenient ? p_.lenience : 1.0; }

 private:
  // A row that holds the law is judged at the drafted token alone.
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

  // The probability with which draft i was to stand.
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
