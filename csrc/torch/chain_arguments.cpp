#include "torch/chain_arguments.h"

#include <array>

namespace specdec {
namespace {

constexpr std::array<const char*, 7> kRules = {"token",   "block",   "greedy",   "match",
                                               "typical", "lenient", "synthetic"};

Kind kind_of(const std::string& kind) {
  if (kind == "logits") return Kind::kLogits;
  SPECDEC_CHECK(kind == "probs", "kind must be one of logits, probs, got ", kind);
  return Kind::kProbs;
}

Rule rule_of(const std::string& rule) {
  std::string all;
  for (size_t i = 0; i < kRules.size(); ++i) {
    if (rule == kRules[i]) return static_cast<Rule>(i);
    all += std::string(i == 0 ? "" : ", ") + kRules[i];
  }
  fail("rule must be one of ", all, ", got ", rule);
}

bool is_id(ScalarType t) { return t == ScalarType::Int || t == ScalarType::Long; }

void check_matrix(const char* name, const Tensor& t, const char* shape, int64_t rows,
                  int64_t columns, ScalarType dtype, const Tensor& target) {
  SPECDEC_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns, name, " must be ", shape,
                " = [", rows, ", ", columns, "], got ", shape_of(t));
  SPECDEC_CHECK(t.scalar_type() == dtype, name, " must be ", dtype_name(dtype), ", got ",
                dtype_name(t.scalar_type()));
  check_same_device(name, t, target, "target");
}

template <class T>
const T* pointer(std::optional<Tensor>& t) {
  if (!t) return nullptr;
  *t = dense(*t);
  return t->const_data_ptr<T>();
}

}  // namespace

bool ChainArguments::ragged_draft() const { return draft && cu_rows && draft->dim() == 2; }

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
  if (draft) check_draft_rows();
  if (draft_ids) {
    const bool alike =
        draft && draft_ids->dim() == draft->dim() && shape_of(*draft_ids) == shape_of(*draft);
    SPECDEC_CHECK(alike, "draft ids must be like the draft probabilities, ",
                  draft ? shape_of(*draft) : "None", ", got ", shape_of(*draft_ids));
    SPECDEC_CHECK(is_id(draft_ids->scalar_type()), "draft ids must be int32 or int64, got ",
                  dtype_name(draft_ids->scalar_type()));
    check_same_device("draft ids", *draft_ids, target, "target");
  }
  if (draft_columns) {
    check_vector("draft_map columns", *draft_columns, target.size(target.dim() - 1),
                 ScalarType::Int, target, "target");
    SPECDEC_CHECK(draft && !draft_ids,
                  "draft_map must be None unless draft holds rows over a vocabulary of its own");
  }
  SPECDEC_CHECK(draft_logsumexp.has_value() == draft_threshold.has_value() &&
                    (!draft_logsumexp || (draft && !draft_ids)),
                "draft_logsumexp and draft_threshold must come together and with draft");
  if (draft_logsumexp) {
    check_matrix("draft_logsumexp", *draft_logsumexp, "[B, gamma]", b, gamma, ScalarType::Double,
                 target);
    check_matrix("draft_threshold", *draft_threshold, "[B, gamma]", b, gamma, ScalarType::Float,
                 target);
  }
  if (draft_temperatures) {
    check_vector("draft temperature", *draft_temperatures, b, ScalarType::Float, target, "target");
  } else {
    const float t = static_cast<float>(draft_temperature);
    SPECDEC_CHECK(std::isfinite(t) && t >= 0,
                  "draft temperature must be finite and at least 0, got ", t);
  }
}

void ChainArguments::check_draft_rows() const {
  const int64_t b = draft_tokens.size(0), gamma = draft_tokens.size(1);
  const char* name = draft_ids ? "draft probabilities" : "draft";
  const char* last = draft_ids ? "K" : "D";
  if (ragged_draft()) {
    const int64_t n = target.size(0) - b;
    SPECDEC_CHECK(n >= 0, "target must be [N, V] with N >= B = ", b, " when draft is [N-B, ", last,
                  "], got ", shape_of(target));
    SPECDEC_CHECK(draft->size(0) == n, name, " must be [N-B, ", last, "] = [", n, ", ", last,
                  "], got ", shape_of(*draft));
  } else {
    SPECDEC_CHECK(draft->dim() == 3 && draft->size(0) == b && draft->size(1) == gamma, name,
                  " must be [B, gamma, ", last, "] = [", b, ", ", gamma, ", ", last, "], got ",
                  shape_of(*draft));
  }
  SPECDEC_CHECK(!draft_ids || draft->size(draft->dim() - 1) >= 1, name,
                " must have K >= 1 entries, got ", shape_of(*draft));
  check_rows(name, *draft);
  check_same_device(name, *draft, target, "target");
}

void ChainArguments::check_uniforms() const {
  if (!uniforms) return;
  check_matrix("uniforms", *uniforms, "[B, gamma+1]", draft_tokens.size(0),
               draft_tokens.size(1) + 1, ScalarType::Double, target);
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
  if (draft) {
    p.draft.form = draft_ids         ? DraftForm::kSparse
                   : draft_logsumexp ? DraftForm::kSampled
                                     : DraftForm::kRows;
    p.draft.flat = ragged_draft();
    p.draft.num_rows = draft->size(p.draft.flat ? 0 : 1);
    p.draft.vocab = draft->size(draft->dim() - 1);
    p.draft.rows = {draft->const_data_ptr(), row_dtype(*draft), p.draft.flat ? 0 : draft->stride(0),
                    draft->stride(p.draft.flat ? 0 : 1)};
  }
  p.draft.kind = p.kind;
  if (draft_ids) {
    draft_ids = dense(*draft_ids);
    p.draft.ids = draft_ids->const_data_ptr();
    p.draft.ids_are_int64 = draft_ids->scalar_type() == ScalarType::Long;
  }
  p.draft.columns = pointer<int32_t>(draft_columns);
  p.draft.logsumexp = pointer<double>(draft_logsumexp);
  p.draft.threshold = pointer<float>(draft_threshold);
  p.draft.temperatures = pointer<float>(draft_temperatures);
  p.draft.temperature = static_cast<float>(draft_temperature);
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
