#pragma once
// Which drafts of a sequence are accepted, from the summaries of their rows.
// csrc/cpu/chain/decide.cpp decides the same. Rule block is in block.cuh.
#include "cuda/chain/sequence.cuh"

namespace specdec::cuda {

// P of the drafted token. Weights are rounded, so that P of the only survivor may be a little above
// 1, and so any bound.
inline __device__ double drafted_probability(const RowSummary& target) {
  return fmin(1.0, exp_of(target.stats.logprob(target.entry)));
}

// Rule top_beta: whether the drafted token is near enough to the likeliest one. At temperature 0 P
// is that of temperature 1 without filters.
inline __device__ bool near_top(const ChainParams& p, const ChainSequence& s,
                                const RowSummary& target) {
  const bool probabilities = p.kind == Kind::kProbs && s.greedy;
  return within_top_distance(target.entry, target.stats.max, s.greedy ? 1 : target.stats.inv_t,
                             p.top_beta_distance, probabilities) &&
         (s.greedy || target.stats.logprob(target.entry) > -INFINITY);
}

// Target row i as far as a test needs it. A direct row is read at the drafted token alone until
// that is rejected.
inline __device__ RowSummary target_of(const ChainJob& job, const ChainSequence& s, int64_t i) {
  if (!s.direct) return job.summaries[job.target_slot(s.b, i)];
  RowSummary target = {};
  target.stats.direct = true;
  target.listed = -1;
  const int64_t x = i < s.num_drafts ? job.p.drafted(s.b, i) : -1;
  if (x >= 0 && x < job.p.vocab) target.entry = at(target_row(job.p, s, i), x);
  target.stats.valid = target.entry < INFINITY;
  return target;
}

// Q of draft i, looked up at the drafted token x.
inline __device__ void open_draft(const ChainJob& job, const ChainSequence& s, int64_t i, int64_t x,
                                  DraftDistribution& d) {
  const ChainParams& p = job.p;
  open_draft(p.draft, s.b, draft_row(p, s, i), draft_statistic(p, s, i), x, s.draft_temperature, d);
  if (!d.unmeasured()) return;
  const RowSummary& row = job.summaries[job.draft_slot(s.b, i)];
  d.row_checked = row.stats.valid;
  d.set(row.stats, &row.entry);
}

struct DraftTest {
  bool accepted;
  double probability;  // of acceptance; NaN if the test did not take place
  double logprob;      // of the drafted token
};

// The test of draft i by itself; not for rule block.
inline __device__ DraftTest test_draft(const ChainJob& job, const ChainSequence& s, int64_t i) {
  const ChainParams& p = job.p;
  const int64_t x = p.drafted(s.b, i);
  const RowSummary target = target_of(job, s, i);
  const RowStats& stats = target.stats;
  if (!stats.valid) return {false, NAN, 0};
  if (p.rule == Rule::kSynthetic) {
    const Acceptance a = accept_at_rate(accept_uniform(p, s, i), p.synthetic_rates[i]);
    return {a.accepted, a.probability, s.greedy ? 0 : stats.logprob(target.entry)};
  }
  const bool inside = x < p.vocab;
  const double logprob = s.greedy ? 0 : inside ? stats.logprob(target.entry) : -INFINITY;
  bool accepted;
  if (p.rule == Rule::kTopBeta) {
    accepted = near_top(p, s, target) &&
               (target.entry == stats.max || target.asked < static_cast<double>(p.top_beta_rank));
  } else if (s.greedy || p.rule == Rule::kMatch) {
    // The target's choice, or what rule lenient takes for it.
    accepted = x == target.token ||
               (p.rule == Rule::kLenient && inside &&
                accept_near_maximum(target.entry, stats.max, p.lenience, p.kind == Kind::kProbs));
  } else if (p.rule == Rule::kTypical) {
    const double p_x = drafted_probability(target);
    const double bound = typical_needs_entropy(p_x, p.typical_epsilon)
                             ? typical_bound(p.typical_epsilon, p.typical_delta, target.asked)
                             : 0;
    accepted = p_x > bound;
  } else {
    DraftDistribution draft;
    open_draft(job, s, i, x, draft);
    if (draft.invalid_at_token) return {false, NAN, 0};
    const Acceptance a =
        accept_draft(s.direct, accept_uniform(p, s, i), target.entry, logprob, p.lenience, draft);
    return {a.accepted, a.probability, logprob};
  }
  return {accepted, accepted ? 1.0 : 0.0, logprob};
}

// The token that follows the accepted drafts.
enum class Source : int32_t {
  kNothing,
  kChoice,   // of the target
  kTarget,   // drawn from P
  kResidual  // drawn from max(cP - lQ, 0)
};

struct Emission {
  int64_t accepted;  // the number of drafts, and the row of the token
  Source source;
  int32_t status;
  double c;
};

inline __device__ void write_token(const ChainParams& p, int64_t b, int64_t i, int64_t token,
                                   double logprob) {
  const int64_t at = b * (p.gamma + 1) + i;
  put_id(p.tokens, p.ids_are_int64, at, token);
  if (p.logprobs != nullptr) p.logprobs[at] = static_cast<float>(logprob);
}

// For one thread, of the only block that writes this.
inline __device__ void write_accept_prob(const ChainParams& p, int64_t b, int64_t i,
                                         double probability) {
  if (p.accept_probs == nullptr || i >= p.gamma) return;
  p.accept_probs[b * p.gamma + i] = recorded_accept_prob(probability);
}

// What follows row `accepted` of a sequence whose drafts are tested one by one. For one thread.
inline __device__ Emission emission_of(const ChainJob& job, const ChainSequence& s,
                                       int64_t accepted) {
  const ChainParams& p = job.p;
  Emission e = {accepted, Source::kNothing, s.status, 1.0};
  if (s.status != 0 || !s.has_row(accepted)) return e;
  const bool bonus = accepted == s.num_drafts;
  if (bonus) e.status |= s.status_after_drafts;
  // A direct bonus row is not known yet.
  const RowSummary target = target_of(job, s, accepted);
  if (!target.stats.valid) {
    e.status |= target_fault(p, s, accepted);
  } else if (s.greedy || p.rule == Rule::kMatch) {
    e.source = Source::kChoice;
  } else {
    e.source = bonus || !p.reads_draft() ? Source::kTarget : Source::kResidual;
  }
  return e;
}

// Tests all drafts, one in each lane. If `writes`, writes those before the first that is not
// accepted, and the acceptance probability of that one. For one warp; in every lane.
inline __device__ int64_t count_accepted(const ChainJob& job, const ChainSequence& s, bool writes) {
  int64_t first = 0;
  int accepted;
#pragma unroll 1
  do {
    const int64_t i = first + lane_id();
    DraftTest test = {false, NAN, 0};
    if (i < s.num_drafts) test = test_draft(job, s, i);
    const unsigned others = ~__ballot_sync(kAllLanes, test.accepted);
    accepted = others == 0 ? kLanes : __ffs(static_cast<int>(others)) - 1;
    if (writes && lane_id() <= accepted) write_accept_prob(job.p, s.b, i, test.probability);
    if (writes && lane_id() < accepted) {
      write_token(job.p, s.b, i, job.p.drafted(s.b, i), test.logprob);
    }
    first += accepted;
  } while (accepted == kLanes);
  return first;
}

}  // namespace specdec::cuda
