#include "arguments/tree.h"

namespace specdec {

void TreeArguments::check() const {
  const Names names = {"tree tokens", "N", "R"};
  checked_kind();
  checked_rule();
  check_drafted(names);
  check_parents();
  check_target(names);
  check_same_device("tree parents", parents, target, "target");
  check_draft(names);
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

void TreeArguments::check_draft(const Names& names) const {
  SPECDEC_CHECK(draft_rows || !flat_draft(),
                "draft must be [B, N, D] unless draft_rows is given, got two dimensions");
  SPECDEC_CHECK(checked_rule() != TreeRule::kKSeq || draft_arguments.rows,
                "draft must be given when rule is k_seq, got None");
  if (draft_rows) return check_chosen_draft(names);
  const DraftSizes each = {{"B", batch()}, {"N", size()}};
  draft_arguments.check(target, batch(), each, each);
}

std::array<Output, 6> TreeArguments::outputs() const {
  const int64_t b = batch(), emitted = max_depth + 1;
  return {{{"[B, max_depth]", parents.scalar_type(), b, max_depth},
           {"[B, max_depth+1]", drafted.scalar_type(), b, emitted},
           {"[B]", ScalarType::Int, b},
           {"[B]", ScalarType::Int, b},
           {"[B, max_depth+1]", ScalarType::Float, b, emitted, with_logprobs},
           {"[B, N]", ScalarType::Float, b, size(), with_accept_probs}}};
}

TreeParams TreeArguments::params(const TreeOutputs& out) {
  const auto& [path, tokens, num_accepted, status, logprobs, accept_probs] = out;
  TreeParams p = of_rules;
  fill(p);
  fill_outputs(p, tokens, num_accepted, status, logprobs, accept_probs);
  p.rule = checked_rule();
  p.nodes = size();
  p.max_depth = max_depth;
  p.parents = parents.const_data_ptr();
  p.stride_parent_sequence = parents.stride(0);
  p.stride_parent = parents.stride(1);
  p.parents_are_int64 = parents.scalar_type() == ScalarType::Long;
  p.path = path.mutable_data_ptr();
  return p;
}

}  // namespace specdec
