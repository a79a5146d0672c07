#include "cpu/tree/decide.h"

#include <algorithm>
#include <cmath>

#include "cpu/tree/k_seq.h"

namespace specdec::cpu {

// Nodes with equal paths of tokens continue one text, so the children of all of them are tried.
void TopDownVerifier::decide() {
  std::vector<int64_t>& path_nodes = scratch_.path_nodes;
  path_nodes.assign(1, kRoot);
  int64_t node = kRoot;
  for (int64_t depth = 0; !ends_at(depth, node); ++depth) {
    const TreeStep step = measure_step(depth, node);
    if (!step.stats.valid) {
      status_ |= target_fault(p_, state_, node + 1);
      return;
    }
    find_children(depth);
    const Decision decision = decide_step(step);
    node = decision.child;
    if (node == kNone) {
      write(depth, decision.token, step.stats.logprob(step.row, decision.token));
      return;
    }
    accept(depth, node, step.stats.logprob(step.row, token(node)));
    path_nodes.clear();
    for (int64_t n : scratch_.children) {
      if (token(n) == token(node)) path_nodes.push_back(n);
    }
  }
}

void TopDownVerifier::find_children(int64_t depth) {
  std::vector<int64_t>& children = scratch_.children;
  children.clear();
  if (depth == p_.max_depth) return;
  for (int64_t m : scratch_.path_nodes) {
    for (int64_t n = nodes_.first_child(m); n >= 0; n = nodes_.next_siblings[n]) {
      children.push_back(n);
    }
  }
  std::sort(children.begin(), children.end());
}

TopDownVerifier::Decision TopDownVerifier::decide_step(const TreeStep& step) {
  if (state_.greedy) return match_target(step);
  switch (p_.rule) {
    case TreeRule::kTypical:
      return typical(step);
    case TreeRule::kMultiDraft:
    case TreeRule::kMultiDraftWor:
      return multi_draft(step);
    case TreeRule::kTopKPlusOne:
      return top_k_plus_one(step);
    case TreeRule::kKSeq:
      return k_seq(step);
    default:
      return match_target(step);
  }
}

// Rule greedy takes the maximum, match the maximum under shared Gumbel noise, target_only a draw.
TopDownVerifier::Decision TopDownVerifier::match_target(const TreeStep& step) {
  const bool drawn = !state_.greedy && p_.rule == TreeRule::kTargetOnly;
  const int64_t y = drawn ? draw_target(step)
                          : gumbel_argmax(step.row, step.stats, scratch_.target,
                                          shared_noise(step.depth), parallel_);
  for (int64_t n : distinct_tokens()) {
    record_accept_prob(n, drawn ? std::exp(step.stats.logprob(step.row, token(n))) : token(n) == y);
  }
  return {find(scratch_.children, y), y};
}

// Accepts the likeliest child above the bound. The bound needs the entropy, which is a pass over
// the row, only if a child does not exceed epsilon.
TopDownVerifier::Decision TopDownVerifier::typical(const TreeStep& step) {
  const double epsilon = p_.typical_epsilon;
  double bound = NAN, best = -1;
  int64_t likeliest = kNone;
  for (int64_t n : distinct_tokens()) {
    const double p_x = std::exp(step.stats.logprob(step.row, token(n)));
    if (typical_needs_entropy(p_x, epsilon) && std::isnan(bound)) {
      const double h = entropy(step.row, step.stats, parallel_, scratch_.entropies);
      bound = typical_bound(epsilon, p_.typical_delta, h);
    }
    const bool accepted = p_x > epsilon || p_x > bound;
    record_accept_prob(n, accepted);
    if (!accepted || p_x <= best) continue;
    best = p_x;
    likeliest = n;
  }
  return {likeliest, likeliest == kNone ? draw_target(step) : kNone};
}

bool TopDownVerifier::accepts(const TreeStep& step, const Residual& residual, int64_t node,
                              int64_t trial, const DraftDistribution& draft, double s) const {
  const double u = accept_uniform(p_, state_, node, step.depth, trial);
  const int64_t x = token(node);
  // A residual is computed as probabilities; only P itself has exact logarithms.
  const bool probabilities = !residual.is_target() || step.stats.direct;
  const double p_x = probabilities ? residual.at(x) : 0;
  const double log_p = probabilities || x >= p_.vocab ? -INFINITY : step.stats.logprob(step.row, x);
  return record_test(node, accept_draft(probabilities, u, p_x, log_p, s, draft));
}

bool TopDownVerifier::record_test(int64_t node, const Acceptance& a) const {
  record_accept_prob(node, a.probability);
  return a.accepted;
}

// Rules multi_draft and multi_draft_wor. Without replacement, a later sibling was drawn from Q
// without the tokens tried before it.
TopDownVerifier::Decision TopDownVerifier::multi_draft(const TreeStep& step) {
  const bool with_replacement = p_.rule == TreeRule::kMultiDraft;
  Residual residual = full_residual(step);
  int64_t trial = -1;
  for (int64_t n : with_replacement ? scratch_.children : distinct_draws()) {
    ++trial;
    const int64_t x = token(n);
    TriedDraft& tried = tried_draft(residual, n, x);
    const bool summed = !tried.draft.invalid_at_token &&
                        tried.sum_mass(p_.vocab, parallel_, scratch_.residual.masses);
    if (!summed) {
      status_ |= kDraftInvalid;
      break;
    }
    // Outside the excluded tokens Q has no mass that this sibling could have been drawn from.
    if (!(tried.mass > kLeastMass)) continue;
    const double s = residual.mass / tried.mass;
    if (accepts(step, residual, n, trial, tried.draft, s)) return {n, kNone};
    if (!with_replacement) residual.exclude(tried, x);
    const Residual::Sums sums = residual.sums_after(tried, s, false);
    if (!sums.valid) {
      if (!with_replacement) residual.undo_exclude(tried);
      status_ |= kDraftInvalid;
      break;
    }
    residual.subtract(tried, s);
    residual.mass = sums.positive;
    if (!(residual.mass > 0)) break;
  }
  return {kNone, draw_recovered(step, residual)};
}

// All children but the last are the top tokens of Q; the last one was drawn from Q without them and
// is the only one that is tried. If it is rejected, the token drawn may still be one of the top.
TopDownVerifier::Decision TopDownVerifier::top_k_plus_one(const TreeStep& step) {
  Residual residual = full_residual(step);
  std::vector<int64_t>& top = distinct_tokens();
  const int64_t last = scratch_.children.empty() ? kNone : scratch_.children.back();
  if (!top.empty() && top.back() == last) {
    top.pop_back();
    TriedDraft& tried = tried_draft(residual, last, token(last));
    for (int64_t n : top) tried.excluded.push_back(token(n));
    if (!top.empty()) tried.mass = NAN;
    const bool valid =
        !tried.draft.invalid_at_token &&
        (top.empty() ? tried.draft.whole_row_valid(parallel_)
                     : tried.sum_mass(p_.vocab, parallel_, scratch_.residual.masses));
    if (!valid) {
      status_ |= kDraftInvalid;
    } else if (tried.mass > kLeastMass) {
      const double s = 1 / tried.mass;
      if (accepts(step, residual, last, 0, tried.draft, s)) return {last, kNone};
      residual.mass = residual.sums_after(tried, s, false).positive;
      residual.subtract(tried, s);
    }
  }
  const int64_t y = draw_recovered(step, residual);
  if (residual.is_target() || !(residual.mass > 0)) residual = full_residual(step);
  if (residual.is_target() && step.stats.direct) residual.mass = total(scratch_.target.sums);
  for (int64_t n : top) record_accept_prob(n, residual.at(token(n)) / residual.mass);
  return {find(top, y), y};
}

// Each child is tried against P itself, with the draft distribution of the first one.
TopDownVerifier::Decision TopDownVerifier::k_seq(const TreeStep& step) {
  const std::vector<int64_t>& children = scratch_.children;
  if (children.empty()) return {kNone, draw_target(step)};
  const auto siblings = static_cast<int64_t>(children.size());
  const Residual residual = full_residual(step);
  DraftDistribution draft = draft_of(children[0]);
  bool valid = true;
  for (int64_t n : children) {
    draft.look_up(token(n));
    valid = valid && !draft.invalid_at_token;
  }
  KSeq rule(step.row, step.stats, survivors(step.stats), draft, parallel_, scratch_.residual);
  if (!valid || !rule.solve(siblings)) {
    status_ |= kDraftInvalid;
    return {kNone, draw_target(step)};
  }
  for (int64_t trial = 0; trial < siblings; ++trial) {
    const int64_t n = children[trial];
    draft.look_up(token(n));
    if (accepts(step, residual, n, trial, draft, rule.rho())) return {n, kNone};
  }
  const int64_t y = rule.draw(residual_uniform(p_, state_, step.depth));
  if (y >= 0) return {kNone, y};
  status_ |= kEmptyResidual;
  return {kNone, draw_target(step)};
}

Residual TopDownVerifier::full_residual(const TreeStep& step) {
  return Residual(step.row, step.stats, 1.0, survivors(step.stats), parallel_, scratch_.residual);
}

int64_t TopDownVerifier::draw_recovered(const TreeStep& step, Residual& residual) {
  if (residual.is_target()) return draw_target(step);
  const int64_t y =
      residual.mass > 0 ? residual.draw(residual_uniform(p_, state_, step.depth)) : kNone;
  if (y >= 0) return y;
  status_ |= kEmptyResidual;
  return draw_target(step);
}

std::vector<int64_t>& TopDownVerifier::distinct_tokens() {
  std::vector<int64_t>& kept = scratch_.distinct;
  kept.clear();
  for (int64_t n : scratch_.children) {
    if (find(kept, token(n)) == kNone) kept.push_back(n);
  }
  return kept;
}

std::vector<int64_t>& TopDownVerifier::distinct_draws() {
  std::vector<int64_t>& kept = scratch_.distinct;
  kept.clear();
  for (int64_t n : scratch_.children) {
    const bool repeated = std::any_of(kept.begin(), kept.end(), [&](int64_t m) {
      return token(m) == token(n) && nodes_.parents[m] == nodes_.parents[n] &&
             draft_row(m) == draft_row(n);
    });
    if (!repeated) kept.push_back(n);
  }
  return kept;
}

int64_t TopDownVerifier::find(const std::vector<int64_t>& nodes, int64_t x) const {
  for (int64_t n : nodes) {
    if (token(n) == x) return n;
  }
  return kNone;
}

}  // namespace specdec::cpu
