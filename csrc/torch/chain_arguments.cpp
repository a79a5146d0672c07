#include "torch/chain_arguments.h"

#include <array>

namespace specdec {
namespace {

constexpr std::array<const char*, 7> kRules = {"token",   "block",   "greedy",   "match",
                                               "typical", "lenient", "synthetic"};

Rule rule_of(const std::string& rule) {
  return static_cast<Rule>(one_of("rule", rule, kRules.data(), kRules.size()));
}

}  // namespace

bool ChainArguments::ragged_draft() const { return law.rows && cu_rows && law.rows->dim() == 2; }

void ChainArguments::check() const {
  kind_of(kind);
  rule_of(rule);
  SPECDEC_CHECK(draft_tokens.dim() == 2, "draft_tokens must be [B, gamma], got ",
                shape_of(draft_tokens));
  SPECDEC_CHECK(is_id(draft_tokens.scalar_type()), "draft_tokens must be int32 or int64, got ",
                dtype_name(draft_tokens.scalar_type()));
  check_target();
  check_draft();
  const int64_t b = draft_tokens.size(0);
  sampling.check_all(b, target, "target");
  check_vector("seeds", seeds, b, ScalarType::Long, target, "target");
  check_vector("positions", positions, b, ScalarType::Long, target, "target");
  check_uniforms();
  check_rule();
  check_limits();
}

void ChainArguments::check_target() const {
  const int64_t b = draft_tokens.size(0), gamma = draft_tokens.size(1);
  if (cu_rows) {
    SPECDEC_CHECK(target.dim() == 2, "target must be [N, V] when cu_rows is given, got ",
                  shape_of(target));
    check_vector("cu_rows", *cu_rows, b + 1, ScalarType::Int, target, "target");
  } else {
    SPECDEC_CHECK(target.dim() == 3 && target.size(0) == b && target.size(1) == gamma + 1,
                  "target must be [B, gamma+1, V] = [", b, ", ", gamma + 1, ", V], got ",
                  shape_of(target));
  }
  check_rows("target", target);
  check_same_device("draft_tokens", draft_tokens, target, "target");
}

void ChainArguments::check_draft() const {
  const int64_t b = draft_tokens.size(0), gamma = draft_tokens.size(1);
  const DraftSizes each = {{"B", b}, {"gamma", gamma}};
  if (!ragged_draft()) return law.check(target, b, each, each);
  const int64_t n = target.size(0) - b;
  SPECDEC_CHECK(n >= 0, "target must be [N, V] with N >= B = ", b, " when draft is [N-B, ",
                law.ids ? "K" : "D", "], got ", shape_of(target));
  law.check(target, b, {{"N-B", n}}, each);
}

void ChainArguments::check_uniforms() const {
  if (!uniforms) return;
  check_matrix("uniforms", *uniforms, "[B, gamma+1]", draft_tokens.size(0),
               draft_tokens.size(1) + 1, ScalarType::Double, target, "target");
  SPECDEC_CHECK(rule != "match", "uniforms must be None when rule is match");
}

void ChainArguments::check_rule() const {
  const float l = static_cast<float>(lenience), epsilon = static_cast<float>(typical_epsilon),
              delta = static_cast<float>(typical_delta);
  SPECDEC_CHECK(0 < l && l <= 1, "lenience must be in (0, 1], got ", l);
  SPECDEC_CHECK(0 <= epsilon && epsilon <= 1, "typical_epsilon must be in [0, 1], got ", epsilon);
  SPECDEC_CHECK(std::isfinite(delta) && delta >= 0,
                "typical_delta must be finite and at least 0, got ", delta);
  SPECDEC_CHECK(synthetic_rates.has_value() == (rule == "synthetic"),
                "synthetic_rates must be given with rule synthetic and with no other");
  if (synthetic_rates) {
    check_vector("synthetic_rates", *synthetic_rates, draft_tokens.size(1), ScalarType::Float,
                 target, "target");
  }
}

void ChainArguments::check_limits() const {
  if (eos_ids) {
    SPECDEC_CHECK(eos_ids->dim() == 1, "eos_ids must be [E], got ", shape_of(*eos_ids));
    check_vector("eos_ids", *eos_ids, eos_ids->size(0), ScalarType::Long, target, "target");
  }
  if (max_emit) {
    check_vector("max_emit", *max_emit, draft_tokens.size(0), ScalarType::Long, target, "target");
  }
}

ChainOutputs ChainArguments::new_outputs() const {
  const int64_t b = draft_tokens.size(0), gamma = draft_tokens.size(1);
  const auto make = [&](int64_t rows, int64_t columns, ScalarType dtype) {
    return torch::stable::new_empty(draft_tokens, {rows, columns}, dtype);
  };
  return {make(b, gamma + 1, draft_tokens.scalar_type()),
          torch::stable::new_empty(draft_tokens, {b}, ScalarType::Int),
          torch::stable::new_empty(draft_tokens, {b}, ScalarType::Int),
          with_logprobs ? make(b, gamma + 1, ScalarType::Float) : make(0, 0, ScalarType::Float),
          with_acceptance ? make(b, gamma, ScalarType::Float) : make(0, 0, ScalarType::Float)};
}

ChainParams ChainArguments::params(const ChainOutputs& out) {
  ChainParams p{};
  p.kind = kind_of(kind);
  p.rule = rule_of(rule);
  p.batch = draft_tokens.size(0);
  p.gamma = draft_tokens.size(1);
  p.vocab = target.size(target.dim() - 1);
  p.num_rows = target.size(0);
  p.cu_rows = pointer<int32_t>(cu_rows);
  p.target = {target.const_data_ptr(), row_dtype(target), cu_rows ? 0 : target.stride(0),
              target.stride(cu_rows ? 0 : 1)};
  p.draft = law.source(p.kind, ragged_draft());
  p.draft_tokens = draft_tokens.const_data_ptr();
  p.stride_token_sequence = draft_tokens.stride(0);
  p.stride_token = draft_tokens.stride(1);
  p.ids_are_int64 = draft_tokens.scalar_type() == ScalarType::Long;
  seeds = dense(seeds);
  positions = dense(positions);
  p.seeds = seeds.const_data_ptr<int64_t>();
  p.positions = positions.const_data_ptr<int64_t>();
  p.uniforms = pointer<double>(uniforms);
  p.synthetic_rates = pointer<float>(synthetic_rates);
  p.eos_ids = pointer<int64_t>(eos_ids);
  p.num_eos = eos_ids ? eos_ids->size(0) : 0;
  p.max_emit = pointer<int64_t>(max_emit);
  p.lenience = rule == "lenient" ? static_cast<float>(lenience) : 1.0f;
  p.typical_epsilon = static_cast<float>(typical_epsilon);
  p.typical_delta = static_cast<float>(typical_delta);
  p.sampling = sampling.params();
  p.tokens = std::get<0>(out).mutable_data_ptr();
  p.num_accepted = std::get<1>(out).mutable_data_ptr<int32_t>();
  p.status = std::get<2>(out).mutable_data_ptr<int32_t>();
  if (with_logprobs) p.logprobs = std::get<3>(out).mutable_data_ptr<float>();
  if (with_acceptance) p.acceptance = std::get<4>(out).mutable_data_ptr<float>();
  return p;
}

}  // namespace specdec
