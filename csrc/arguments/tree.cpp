#include "arguments/tree.h"

#include "arguments/launch.h"

namespace specdec {

void TreeArguments::check() const {
  const Names names = {"tree tokens", "N", "R"};
  checked_kind();
  checked_rule();
  check_drafted(names);
  check_parents();
  check_target(names);
  check_same_device("tree parents", parents, target, "target");
  check_draft();
  check_draws("[B, 2N+1]", 2 * size() + 1, checked_rule() == TreeRule::kMatch);
  check_rule_parameters(of_rules, checked_rule(), kParameters);
  check_limits();
  SPECDEC_CHECK(0 <= max_depth && max_depth <= size(), "max_depth must be in [0, N] = [0, ", size(),
                "], got ", max_depth);
}

void TreeArguments::check_parents() const {
  const int64_t b = batch(), n = size();
  SPECDEC_CHECK(parents.dim() == 2 && parents.size(0) == b && parents.size(1) == n,
                "tree parents must be [B, N] = [", b, ", ", n, "], got ", shape_of(parents));
  check_ids("tree parents", parents);
}

void TreeArguments::check_draft() const {
  const int64_t b = batch(), n = size();
  if (draft_rows) {
    SPECDEC_CHECK(draft_rows->dim() == 2 && draft_rows->size(0) == b && draft_rows->size(1) == n,
                  "draft_rows must be [B, N] = [", b, ", ", n, "], got ", shape_of(*draft_rows));
    check_ids("draft_rows", *draft_rows);
    check_same_device("draft_rows", *draft_rows, target, "target");
  }
  SPECDEC_CHECK(draft_rows || !flat_draft(),
                "draft must be [B, N, D] unless draft_rows is given, got two dimensions");
  SPECDEC_CHECK(checked_rule() != TreeRule::kKSeq || draft_arguments.rows,
                "draft must be given when rule is k_seq, got None");
  if (!draft_rows) {
    const DraftSizes each = {{"B", b}, {"N", n}};
    return draft_arguments.check(target, b, each, each);
  }
  const int64_t m =
      draft_arguments.rows && draft_arguments.rows->dim() >= 2 && draft_arguments.rows->dim() <= 3
          ? draft_arguments.rows->size(draft_arguments.rows->dim() - 2)
          : kAnySize;
  if (flat_draft()) return draft_arguments.check(target, b, {{"M", kAnySize}}, {{"M", m}});
  draft_arguments.check(target, b, {{"B", b}, {"M", kAnySize}}, {{"B", b}, {"M", m}});
}

TreeOutputs TreeArguments::new_outputs() const {
  return {new_output(max_depth, parents.scalar_type()),
          new_output(max_depth + 1, drafted.scalar_type()),
          new_counts(),
          new_counts(),
          new_floats(with_logprobs, max_depth + 1),
          new_floats(with_accept_probs, size())};
}

TreeParams TreeArguments::params(const TreeOutputs& out) {
  const auto& [path, tokens, num_accepted, status, logprobs, accept_probs] = out;
  TreeParams p = of_rules;
  fill(p, flat_draft());
  fill_outputs(p, tokens, num_accepted, status, logprobs, accept_probs);
  p.rule = checked_rule();
  p.nodes = size();
  p.max_depth = max_depth;
  p.draft_rows = integers(draft_rows);
  p.parents = parents.const_data_ptr();
  p.stride_parent_sequence = parents.stride(0);
  p.stride_parent = parents.stride(1);
  p.parents_are_int64 = parents.scalar_type() == ScalarType::Long;
  p.path = path.mutable_data_ptr();
  return p;
}

TreeOutputs TreeArguments::run() {
  check();
  const TreeOutputs out = new_outputs();
  launch(target, params(out), SPECDEC_LAUNCHERS(TreeParams, verify_tree));
  return out;
}

}  // namespace specdec
