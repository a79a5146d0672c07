#include "specdec/chain.h"

#include "torch/checks.h"
#include "torch/ops.h"
#include "torch/parallel.h"

namespace specdec {
namespace {

Kind kind_of(const std::string& kind) {
  if (kind == "logits") return Kind::kLogits;
  SPECDEC_CHECK(kind == "probs", "kind must be one of logits, probs, got ", kind);
  return Kind::kProbs;
}

Rule rule_of(const std::string& rule) {
  if (rule == "token") return Rule::kToken;
  if (rule == "greedy") return Rule::kGreedy;
  SPECDEC_CHECK(rule == "match", "rule must be one of token, greedy, match, got ", rule);
  return Rule::kMatch;
}

void check_target(const Tensor& target, const std::optional<Tensor>& cu_rows, int64_t b,
                  int64_t gamma) {
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
}

void check_draft(const Tensor& draft, const Tensor& target, bool ragged, int64_t b, int64_t gamma) {
  const int64_t v = target.size(target.dim() - 1);
  if (ragged) {
    const int64_t n = target.size(0) - b;
    SPECDEC_CHECK(draft.size(0) == n && draft.size(1) == v, "draft must be [N-B, V] = [", n, ", ",
                  v, "], got ", shape_of(draft));
  } else {
    SPECDEC_CHECK(
        draft.dim() == 3 && draft.size(0) == b && draft.size(1) == gamma && draft.size(2) == v,
        "draft must be [B, gamma, V] = [", b, ", ", gamma, ", ", v, "], got ", shape_of(draft));
  }
  check_rows("draft", draft);
  check_same_device("draft", draft, target, "target");
}

void check_sampled(const char* name, const Tensor& t, ScalarType dtype, const Tensor& target,
                   int64_t b, int64_t gamma) {
  SPECDEC_CHECK(t.dim() == 2 && t.size(0) == b && t.size(1) == gamma, name,
                " must be [B, gamma] = [", b, ", ", gamma, "], got ", shape_of(t));
  SPECDEC_CHECK(t.scalar_type() == dtype, name, " must be ", dtype_name(dtype), ", got ",
                dtype_name(t.scalar_type()));
  check_same_device(name, t, target, "target");
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> verify_chain(
    Tensor target, Tensor draft_tokens, std::optional<Tensor> draft,
    std::optional<Tensor> draft_logsumexp, std::optional<Tensor> draft_threshold,
    std::optional<Tensor> draft_temperatures, double draft_temperature, std::string kind,
    std::string rule, std::optional<Tensor> temperatures, double temperature,
    std::optional<Tensor> top_ks, int64_t top_k, std::optional<Tensor> top_ps, double top_p,
    std::optional<Tensor> min_ps, double min_p, Tensor seeds, Tensor positions,
    std::optional<Tensor> cu_rows, std::optional<Tensor> uniforms) {
  ChainParams p{};
  p.kind = kind_of(kind);
  p.rule = rule_of(rule);
  SPECDEC_CHECK(draft_tokens.dim() == 2, "draft_tokens must be [B, gamma], got ",
                shape_of(draft_tokens));
  const ScalarType ids = draft_tokens.scalar_type();
  SPECDEC_CHECK(ids == ScalarType::Int || ids == ScalarType::Long,
                "draft_tokens must be int32 or int64, got ", dtype_name(ids));
  const int64_t b = draft_tokens.size(0), gamma = draft_tokens.size(1);
  check_target(target, cu_rows, b, gamma);
  check_same_device("draft_tokens", draft_tokens, target, "target");
  p.draft_ragged = draft && cu_rows && draft->dim() == 2;
  if (draft) check_draft(*draft, target, p.draft_ragged, b, gamma);
  SPECDEC_CHECK(
      draft_logsumexp.has_value() == draft_threshold.has_value() && (!draft_logsumexp || draft),
      "draft_logsumexp and draft_threshold must come together and with draft");
  if (draft_logsumexp) {
    check_sampled("draft_logsumexp", *draft_logsumexp, ScalarType::Double, target, b, gamma);
    check_sampled("draft_threshold", *draft_threshold, ScalarType::Float, target, b, gamma);
  }
  if (draft_temperatures) {
    check_vector("draft temperature", *draft_temperatures, b, ScalarType::Float, target, "target");
  } else {
    draft_temperature = static_cast<float>(draft_temperature);
    SPECDEC_CHECK(std::isfinite(draft_temperature) && draft_temperature >= 0,
                  "draft temperature must be finite and at least 0, got ", draft_temperature);
  }
  SamplingArgs sampling{temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p};
  sampling.check_all(b, target, "target");
  check_vector("seeds", seeds, b, ScalarType::Long, target, "target");
  check_vector("positions", positions, b, ScalarType::Long, target, "target");
  if (uniforms) {
    SPECDEC_CHECK(uniforms->dim() == 2 && uniforms->size(0) == b && uniforms->size(1) == gamma + 1,
                  "uniforms must be [B, gamma+1] = [", b, ", ", gamma + 1, "], got ",
                  shape_of(*uniforms));
    SPECDEC_CHECK(uniforms->scalar_type() == ScalarType::Double, "uniforms must be float64, got ",
                  dtype_name(uniforms->scalar_type()));
    check_same_device("uniforms", *uniforms, target, "target");
    SPECDEC_CHECK(p.rule != Rule::kMatch, "uniforms must be None when rule is match");
  }

  Tensor tokens = torch::stable::new_empty(draft_tokens, {b, gamma + 1}, ids);
  Tensor num_accepted = torch::stable::new_empty(draft_tokens, {b}, ScalarType::Int);
  Tensor status = torch::stable::new_empty(draft_tokens, {b}, ScalarType::Int);
  Tensor logprobs = torch::stable::new_empty(draft_tokens, {b, gamma + 1}, ScalarType::Float);

  seeds = dense(seeds);
  positions = dense(positions);
  for (std::optional<Tensor>* t :
       {&draft_logsumexp, &draft_threshold, &draft_temperatures, &cu_rows, &uniforms}) {
    if (*t) **t = dense(**t);
  }
  if (cu_rows) {
    p.target = {target.const_data_ptr(), row_dtype(target), 0, target.stride(0)};
    p.cu_rows = cu_rows->const_data_ptr<int32_t>();
    p.num_rows = target.size(0);
  } else {
    p.target = {target.const_data_ptr(), row_dtype(target), target.stride(0), target.stride(1)};
  }
  if (draft) {
    p.draft = {draft->const_data_ptr(), row_dtype(*draft), p.draft_ragged ? 0 : draft->stride(0),
               draft->stride(p.draft_ragged ? 0 : 1)};
  }
  p.point_mass = !draft.has_value();
  if (p.draft_ragged) p.num_draft_rows = draft->size(0);
  p.draft_tokens = draft_tokens.const_data_ptr();
  p.stride_token_sequence = draft_tokens.stride(0);
  p.stride_token = draft_tokens.stride(1);
  p.ids_are_int64 = ids == ScalarType::Long;
  if (draft_logsumexp) {
    p.draft_logsumexp = draft_logsumexp->const_data_ptr<double>();
    p.draft_threshold = draft_threshold->const_data_ptr<float>();
  }
  if (draft_temperatures) p.draft_temperatures = draft_temperatures->const_data_ptr<float>();
  p.draft_temperature = static_cast<float>(draft_temperature);
  p.seeds = seeds.const_data_ptr<int64_t>();
  p.positions = positions.const_data_ptr<int64_t>();
  if (uniforms) p.uniforms = uniforms->const_data_ptr<double>();
  p.sampling = sampling.params();
  p.tokens = tokens.mutable_data_ptr();
  p.num_accepted = num_accepted.mutable_data_ptr<int32_t>();
  p.status = status.mutable_data_ptr<int32_t>();
  p.logprobs = logprobs.mutable_data_ptr<float>();
  p.batch = b;
  p.gamma = gamma;
  p.vocab = target.size(target.dim() - 1);
  verify_chain_cpu(p, torch_parallel());
  return {tokens, num_accepted, status, logprobs};
}

}  // namespace specdec
