#include "torch/tree_arguments.h"

#include <array>

namespace specdec {
namespace {

constexpr std::array<const char*, 9> kTreeRules = {
    "greedy",         "match", "target_only", "multi_draft", "multi_draft_wor",
    "top_k_plus_one", "k_seq", "traversal",   "typical"};

TreeRule tree_rule_of(const std::string& rule) {
  return static_cast<TreeRule>(one_of("rule", rule, kTreeRules.data(), kTreeRules.size()));
}

}  // namespace

void TreeArguments::check() const {
  kind_of(kind);
  tree_rule_of(rule);
  check_tree();
  check_target();
  check_same_device("tree parents", parents, target, "target");
  check_draft();
  const int64_t b = tokens.size(0);
  sampling.check_all(b, target, "target");
  check_vector("seeds", seeds, b, ScalarType::Long, target, "target");
  check_vector("positions", positions, b, ScalarType::Long, target, "target");
  check_uniforms();
  check_rule();
}

void TreeArguments::check_tree() const {
  SPECDEC_CHECK(tokens.dim() == 2, "tree tokens must be [B, N], got ", shape_of(tokens));
  SPECDEC_CHECK(is_id(tokens.scalar_type()), "tree tokens must be int32 or int64, got ",
                dtype_name(tokens.scalar_type()));
  const int64_t b = tokens.size(0), n = tokens.size(1);
  SPECDEC_CHECK(parents.dim() == 2 && parents.size(0) == b && parents.size(1) == n,
                "tree parents must be [B, N] = [", b, ", ", n, "], got ", shape_of(parents));
  SPECDEC_CHECK(is_id(parents.scalar_type()), "tree parents must be int32 or int64, got ",
                dtype_name(parents.scalar_type()));
}

void TreeArguments::check_target() const {
  const int64_t b = tokens.size(0), n = tokens.size(1);
  if (cu_rows) {
    SPECDEC_CHECK(target.dim() == 2, "target must be [R, V] when cu_rows is given, got ",
                  shape_of(target));
    check_vector("cu_rows", *cu_rows, b + 1, ScalarType::Int, target, "target");
  } else {
    SPECDEC_CHECK(target.dim() == 3 && target.size(0) == b && target.size(1) == n + 1,
                  "target must be [B, N+1, V] = [", b, ", ", n + 1, ", V], got ", shape_of(target));
  }
  check_rows("target", target);
  check_same_device("tree tokens", tokens, target, "target");
}

void TreeArguments::check_draft() const {
  const int64_t b = tokens.size(0), n = tokens.size(1);
  if (draft_rows) {
    check_matrix("draft_rows", *draft_rows, "[B, N]", b, n, ScalarType::Int, target, "target");
  }
  SPECDEC_CHECK(draft_rows || !flat_draft(),
                "draft must be [B, N, D] unless draft_rows is given, got two dimensions");
  SPECDEC_CHECK(rule != "k_seq" || law.rows, "draft must be given when rule is k_seq, got None");
  if (!draft_rows) {
    const DraftSizes each = {{"B", b}, {"N", n}};
    return law.check(target, b, each, each);
  }
  const int64_t m = law.rows && law.rows->dim() >= 2 && law.rows->dim() <= 3
                        ? law.rows->size(law.rows->dim() - 2)
                        : kAnySize;
  if (flat_draft()) return law.check(target, b, {{"M", kAnySize}}, {{"M", m}});
  law.check(target, b, {{"B", b}, {"M", kAnySize}}, {{"B", b}, {"M", m}});
}

void TreeArguments::check_uniforms() const {
  if (!uniforms) return;
  check_matrix("uniforms", *uniforms, "[B, 2N+1]", tokens.size(0), 2 * tokens.size(1) + 1,
               ScalarType::Double, target, "target");
  SPECDEC_CHECK(rule != "match", "uniforms must be None when rule is match");
}

void TreeArguments::check_rule() const {
  const int64_t b = tokens.size(0), n = tokens.size(1);
  const float epsilon = static_cast<float>(typical_epsilon),
              delta = static_cast<float>(typical_delta);
  SPECDEC_CHECK(0 <= epsilon && epsilon <= 1, "typical_epsilon must be in [0, 1], got ", epsilon);
  SPECDEC_CHECK(std::isfinite(delta) && delta >= 0,
                "typical_delta must be finite and at least 0, got ", delta);
  if (eos_ids) {
    SPECDEC_CHECK(eos_ids->dim() == 1, "eos_ids must be [E], got ", shape_of(*eos_ids));
    check_vector("eos_ids", *eos_ids, eos_ids->size(0), ScalarType::Long, target, "target");
  }
  if (max_emit) check_vector("max_emit", *max_emit, b, ScalarType::Long, target, "target");
  SPECDEC_CHECK(0 <= max_depth && max_depth <= n, "max_depth must be in [0, N] = [0, ", n,
                "], got ", max_depth);
}

TreeOutputs TreeArguments::new_outputs() const {
  const int64_t b = tokens.size(0), n = tokens.size(1);
  const auto make = [&](int64_t rows, int64_t columns, ScalarType dtype) {
    return torch::stable::new_empty(tokens, {rows, columns}, dtype);
  };
  return {make(b, max_depth, parents.scalar_type()),
          make(b, max_depth + 1, tokens.scalar_type()),
          torch::stable::new_empty(tokens, {b}, ScalarType::Int),
          torch::stable::new_empty(tokens, {b}, ScalarType::Int),
          with_logprobs ? make(b, max_depth + 1, ScalarType::Float) : make(0, 0, ScalarType::Float),
          with_acceptance ? make(b, n, ScalarType::Float) : make(0, 0, ScalarType::Float)};
}

TreeParams TreeArguments::params(const TreeOutputs& out) {
  TreeParams p{};
  p.kind = kind_of(kind);
  p.rule = tree_rule_of(rule);
  p.batch = tokens.size(0);
  p.nodes = tokens.size(1);
  p.max_depth = max_depth;
  p.vocab = target.size(target.dim() - 1);
  p.num_rows = target.size(0);
  p.cu_rows = pointer<int32_t>(cu_rows);
  p.target = {target.const_data_ptr(), row_dtype(target), cu_rows ? 0 : target.stride(0),
              target.stride(cu_rows ? 0 : 1)};
  p.draft = law.source(p.kind, flat_draft());
  p.draft_rows = pointer<int32_t>(draft_rows);
  p.tokens_in = tokens.const_data_ptr();
  p.stride_token_sequence = tokens.stride(0);
  p.stride_token = tokens.stride(1);
  p.ids_are_int64 = tokens.scalar_type() == ScalarType::Long;
  p.parents = parents.const_data_ptr();
  p.stride_parent_sequence = parents.stride(0);
  p.stride_parent = parents.stride(1);
  p.parents_are_int64 = parents.scalar_type() == ScalarType::Long;
  seeds = dense(seeds);
  positions = dense(positions);
  p.seeds = seeds.const_data_ptr<int64_t>();
  p.positions = positions.const_data_ptr<int64_t>();
  p.uniforms = pointer<double>(uniforms);
  p.eos_ids = pointer<int64_t>(eos_ids);
  p.num_eos = eos_ids ? eos_ids->size(0) : 0;
  p.max_emit = pointer<int64_t>(max_emit);
  p.typical_epsilon = static_cast<float>(typical_epsilon);
  p.typical_delta = static_cast<float>(typical_delta);
  p.sampling = sampling.params();
  p.path = std::get<0>(out).mutable_data_ptr();
  p.tokens = std::get<1>(out).mutable_data_ptr();
  p.num_accepted = std::get<2>(out).mutable_data_ptr<int32_t>();
  p.status = std::get<3>(out).mutable_data_ptr<int32_t>();
  if (with_logprobs) p.logprobs = std::get<4>(out).mutable_data_ptr<float>();
  if (with_acceptance) p.acceptance = std::get<5>(out).mutable_data_ptr<float>();
  return p;
}

}  // namespace specdec
