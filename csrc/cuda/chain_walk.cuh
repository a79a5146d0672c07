#pragma once
// The actions of a team. Each is written once, and the kernel calls it at one place: what is
// inlined twice costs registers.
#include "cuda/chain_judge.cuh"
#include "cuda/filter.cuh"

namespace specdec {

constexpr size_t kBinBytes = sizeof(Shared::bins);
constexpr int64_t kLawsAtHand = kBinBytes / sizeof(Law);

class ChainWalk {
 public:
  __device__ ChainWalk(Team& team, const ChainJob& job, int64_t context)
      : team_(team), job_(job), t_(team.task<ChainTask>()), context_(context) {}

  // The drafts before the first that does not stand, a thread a draft.
  __device__ void touch(const Judge& judge) {
    int64_t first = t_.drafts;
#pragma unroll 1
    for (int emit = 0; emit < 2; ++emit) {
      for (int64_t i = thread_id(); i < first; i += kThreads) {
        if (!judge.touch(i, emit != 0)) first = i;
      }
      if (emit == 0) first = static_cast<int64_t>(~team_.max(~static_cast<uint64_t>(first)));
    }
    if (thread_id() == 0) t_.touched = first;
  }

  // Fills the slots of the row at hand.
  __device__ void fill(int part, int parts) const {
    const RaceNoise noise{t_.seed, t_.position + t_.i, kSharedStream};
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      if (which == 0 ? t_.gather : !measures_draft()) continue;
      const Want want = which == 1 ? Want::kMass : first_want(target_want(), t_.filtered, t_.point);
      fill_slot(team_, which == 0 ? t_.row : t_.draft.row, which == 0 ? t_.slot : t_.draft_slot,
                want, inverse_temperature(which == 0 ? t_.params.temperature : t_.q_temperature),
                noise, part, parts);
    }
  }

  // The laws of all rows that were filled beforehand, a warp a row. Of a draft's row that could not
  // be filled comes out what nobody asks for.
  __device__ void measure_ahead() {
    const ChainParams& p = job_.p;
    if (!t_.ahead) return;
    const int64_t targets = t_.drafts + (t_.cut ? 0 : 1);
    const int64_t drafts = p.reads_draft() && p.draft.form == DraftForm::kRows ? t_.drafts : 0;
    for (int64_t i = warp_id(); i < targets + drafts; i += kWarps) {
      const bool of_draft = i >= targets;
      const int64_t at = of_draft ? job_.row_slots() + i - targets : i;
      const Slot slot = job_.slots[context_ * job_.context_slots() + at];
      const int64_t vocab = of_draft ? p.draft.vocab : p.vocab;
      const Law law = warp_law(slot, (vocab + kSpan - 1) / kSpan,
                               of_draft ? t_.q_temperature : t_.params.temperature);
      if (lane_id() == 0) laws()[at] = law;
    }
  }

  // The laws from the filled slots.
  __device__ void measure() {
    const bool sparse = t_.has_draft && t_.draft.form == DraftForm::kSparse && !t_.draft.fault;
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      if (which == 0 ? t_.gather : !measures_draft()) continue;
      if (t_.prefilled && t_.ahead) {
        if (thread_id() == 0) {
          set_law(which, laws()[t_.i + (which == 0 ? 0 : job_.row_slots())], -1);
        }
        continue;
      }
      int64_t token;
      const Law law =
          read_law(team_, which == 0 ? t_.row : t_.draft.row, which == 0 ? t_.slot : t_.draft_slot,
                   which == 0 ? t_.params : Params{t_.q_temperature, 0, 1, 0},
                   which == 0 && t_.filtered, which == 0 ? target_want() : Want::kMass,
                   {t_.seed, t_.position + t_.i, kSharedStream}, token);
      if (thread_id() == 0) set_law(which, law, token);
    }
    if (sparse) look_up_sparse(team_, t_.draft);
  }

  // Sums of max(cP - lQ, 0) and max(lQ - cP, 0) over the row; the first stays in a slot, to draw
  // from. Or, for `entropy`, of P log P.
  __device__ void difference(bool entropy) {
    team_.sync();  // nobody reads these slots any more
    if (!entropy && t_.state == State::kBlockBack && t_.draft.few() && !t_.direct) {
      few_differences(team_, t_.draft, t_.row, t_.law, t_.c, t_.more, t_.less);
      if (thread_id() == 0) t_.lawful = true;
      return;
    }
    const Slot more = extra_slot(0), less = extra_slot(1);
    const int64_t spans = t_.row.spans(), step = team_.span_step(1);
    // Both rows of the next span are on their way while this one is weighed.
    Packed next, next_draft = {};
    int64_t span = team_.first_span(0);
    if (span < spans) load_both(span, entropy, next, next_draft);
    for (; span < spans; span += step) {
      float values[kPerLane];
      unpack(t_.row, next, values);
      const Packed draft = next_draft;
      if (span + step < spans) load_both(span + step, entropy, next, next_draft);
      if (t_.direct) fill_direct(span, values);
      bool lawful = true;
      if (entropy) {
        const Shape shape{t_.law.max, rate_of(t_.law.inv_t), t_.law.threshold};
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          const float w = shape.weight(values[j]);
          values[j] = w > 0 ? w * (t_.law.max - values[j]) : 0.0f;
        }
      } else {
        lawful = subtract(span, draft, values);
      }
      lawful = __all_sync(kAllLanes, lawful);
      if (job_.p.rule == Rule::kBlock) store_positive(less, span, values, -1.0f, true);
      store_positive(more, span, values, 1.0f, lawful);
    }
    rest_of_draft();
    team_.sync();
    add_up(entropy);
  }

  __device__ void draw() {
    const Slot slot = t_.residual ? extra_slot(0) : t_.slot;
    const int64_t spans = t_.row.spans();
    const bool linear = t_.residual || t_.law.direct;
    const float max = linear ? slot_max(team_, slot.maxima, spans) : t_.law.max;
    const SpanMasses masses(team_, slot, spans, max, t_.law.inv_t, linear);
    int64_t rest;
    const int64_t span = masses.choose(team_, last_uniform(), rest);
    float values[kPerLane];
    Packed row, draft = {};
    load_both(span, !t_.residual, row, draft);
    unpack(t_.row, row, values);
    if (t_.residual) {
      subtract(span, draft, values);
    } else if (!linear) {
      weigh(values, {slot.maxima[span], rate_of(t_.law.inv_t), t_.law.threshold});
    }
    if (linear) {
      const float inverse = inverse_scale(slot.maxima[span]);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = values[j] > 0 ? values[j] * inverse : 0.0f;
    }
    const int64_t token = span * kSpan + span_pick(values, t_.row.wide(), rest);
    if (thread_id() == 0) t_.token = token;
  }

 private:
  // What of the target's row is wanted in the end.
  __device__ Want target_want() const {
    return t_.direct ? Want::kLinear : job_.p.rule == Rule::kMatch ? Want::kRace : Want::kMass;
  }

  __device__ bool measures_draft() const { return t_.has_draft && t_.draft.unmeasured(); }

  __device__ double last_uniform() const {
    const ChainParams& p = job_.p;
    return p.uniforms != nullptr ? p.uniforms[t_.b * (p.gamma + 1) + p.gamma]
                                 : uniform(t_.seed, t_.position + t_.i, kResidualStream);
  }

  __device__ Slot extra_slot(int i) const {
    return job_.slots[context_ * job_.context_slots() + 2 * job_.row_slots() + i];
  }

  __device__ float lenience() const {
    return job_.p.rule == Rule::kLenient ? job_.p.lenience : 1.0f;
  }

  // Of rows and their drafts, in memory that a selection would take.
  __device__ Law* laws() const { return reinterpret_cast<Law*>(team_.shared->bins); }

  __device__ void set_law(int which, const Law& law, int64_t token) {
    if (which == 0) {
      t_.law = law;
      t_.token = token;
      return;
    }
    t_.draft.checked = law.sound;
    t_.draft.set(law);
  }

  // A span of the target, and of the draft unless the target's is all that is asked for.
  __device__ void load_both(int64_t span, bool target_alone, Packed& target, Packed& draft) const {
    load_span(t_.row, span, target);
    if (!target_alone) load_draft(t_.draft, t_.row.vocab, t_.row.wide(), span, draft);
  }

  // cP - lQ of a span; values hold the row, `draft` what was loaded of the other.
  __device__ bool subtract(int64_t span, const Packed& draft, float (&values)[kPerLane]) const {
    if (t_.direct) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] = static_cast<float>(t_.c * values[j]);
    } else {
      weigh(values, {t_.law.max, rate_of(t_.law.inv_t), t_.law.threshold});
      const auto scale = static_cast<float>(exp(-t_.law.log_sum) * t_.c);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) values[j] *= scale;
    }
    return subtract_draft(t_.draft, lenience(), t_.row.vocab, t_.row.wide(), span, draft, values);
  }

  // A row that was only touched so far is measured on the way.
  __device__ void fill_direct(int64_t span, const float (&values)[kPerLane]) const {
    float top = span_max(values), w[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) w[j] = values[j];
    const int64_t units = linear_units(w, top);
    if (lane_id() != 0) return;
    t_.slot.maxima[span] = top;
    t_.slot.units[span] = units;
  }

  __device__ void rest_of_draft() const {
    const DraftLaw& d = t_.draft;
    const int64_t size = t_.action == Action::kEntropy ? 0 : rest_size(d, t_.row.vocab);
    if (size == 0) return;
    const Slot slot = extra_slot(2);
    const RowView rest = d.row.part(d.row.vocab - size, size);
    const int64_t step = team_.span_step(1);
    for (int64_t span = team_.first_span(0); span < rest.spans(); span += step) {
      float values[kPerLane];
      read_span(rest, span, values);
      const float top = d.weigh_all(values);
      store_positive(slot, span, values, 1.0f, __all_sync(kAllLanes, top < INFINITY));
    }
  }

  __device__ void add_up(bool entropy) {
    const int64_t spans = t_.row.spans();
    const int64_t rest = entropy ? 0 : (rest_size(t_.draft, t_.row.vocab) + kSpan - 1) / kSpan;
    double more = 0, less = 0, beyond = 0, whole = 0;
#pragma unroll 1
    for (int which = 0; which < 4; ++which) {
      if ((which == 1 && job_.p.rule != Rule::kBlock) || (which == 2 && rest == 0) ||
          (which == 3 && !t_.direct)) {
        continue;
      }
      const Slot slot = which == 3 ? t_.slot : extra_slot(which);
      const double sum = stored_sum(team_, slot, which == 2 ? rest : spans);
      if (which == 0) more = sum;
      if (which == 1) less = sum;
      if (which == 2) beyond = sum;
      if (which == 3) whole = sum;
    }
    if (!entropy && t_.draft.form == DraftForm::kSparse) beyond = sparse_beyond();
    if (thread_id() != 0) return;
    if (entropy) {
      t_.entropy = t_.law.log_sum + t_.law.inv_t * more * exp(-t_.law.log_sum);
      return;
    }
    if (t_.direct) {
      t_.law = {};
      t_.law.direct = true;
      t_.law.sound = whole > 0;
    }
    if (t_.draft.form == DraftForm::kPointMass && t_.draft.token >= t_.row.vocab) beyond = 1;
    // With a map the rest of the row is looked through, and all its tokens were counted already.
    t_.lawful = is_finite(more) && is_finite(beyond);
    t_.more = more;
    t_.less = less + (t_.draft.columns != nullptr && !t_.draft.few() ? 0.0 : beyond);
  }

  __device__ double sparse_beyond() {
    double mass = 0;
    for (int64_t k = thread_id(); k < t_.draft.row.vocab; k += kThreads) {
      if (t_.draft.id(k) >= t_.row.vocab) mass += static_cast<double>(at(t_.draft.row, k));
    }
    return team_.sum(mass);
  }

  Team& team_;
  const ChainJob& job_;
  ChainTask& t_;
  const int64_t context_;
};

}  // namespace specdec
