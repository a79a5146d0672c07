#include "specdec/expand_tree.h"

#include "arguments/checks.h"
#include "torch/parallel.h"
#include "torch/register.h"

namespace specdec {
namespace {

SamplingArguments at_temperature(const std::optional<Tensor>& temperatures, double temperature) {
  return {temperatures, temperature, std::nullopt, 0, std::nullopt, 1.0, std::nullopt, 0.0};
}

void check_expand_tree(const Tensor& logits, const Tensor& scores, int64_t width,
                       const std::optional<Tensor>& temperatures, double temperature) {
  SPECDEC_CHECK(logits.dim() == 3, "logits must be [B, F, V], got ", shape_of(logits));
  check_rows("logits", logits);
  const int64_t batch = logits.size(0), nodes = logits.size(1);
  SPECDEC_CHECK(nodes >= 1, "logits must have a frontier of at least one node, got ",
                shape_of(logits));
  SPECDEC_CHECK(scores.dim() == 2 && scores.size(0) == batch && scores.size(1) == nodes,
                "scores must be [B, F] = [", batch, ", ", nodes, "], got ", shape_of(scores));
  SPECDEC_CHECK(scores.scalar_type() == ScalarType::Float, "scores must be float32, got ",
                dtype_name(scores.scalar_type()));
  check_same_device("scores", scores, logits, "logits");
  SPECDEC_CHECK(width >= 1 && width <= kMaxWidth, "width must be in [1, 64], got ", width);
  at_temperature(temperatures, temperature).check(batch, logits, "logits");
  check_entries("logits", "the children", "[B, F, width]", {batch, nodes, width});
}

std::tuple<Tensor, Tensor, Tensor> expand_tree(Tensor logits, Tensor scores, int64_t width,
                                               std::optional<Tensor> temperatures,
                                               double temperature) {
  check_expand_tree(logits, scores, width, temperatures, temperature);
  const int64_t batch = logits.size(0), nodes = logits.size(1);
  const auto output = [&](std::initializer_list<int64_t> shape, ScalarType dtype) {
    return torch::stable::new_empty(logits, shape, dtype);
  };
  Tensor tokens = output({batch, nodes, width}, ScalarType::Long),
         out_scores = output({batch, nodes, width}, ScalarType::Float),
         frontier = output({batch, width}, ScalarType::Long);
  SamplingArguments sampling = at_temperature(temperatures, temperature);
  const SamplingParams shared = sampling.params();
  ExpandTreeParams p{};
  p.logits = {logits.const_data_ptr(), row_dtype(logits), logits.stride(0), logits.stride(1), {}};
  p.scores = scores.const_data_ptr<float>();
  p.score_stride_sequence = scores.stride(0);
  p.score_stride = scores.stride(1);
  p.temperatures = shared.temperatures;
  p.temperature = shared.temperature;
  p.tokens = tokens.mutable_data_ptr<int64_t>();
  p.out_scores = out_scores.mutable_data_ptr<float>();
  p.frontier = frontier.mutable_data_ptr<int64_t>();
  p.batch = batch;
  p.nodes = nodes;
  p.vocab = logits.size(2);
  p.width = width;
  cpu::expand_tree(p, torch_parallel());
  return {tokens, out_scores, frontier};
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "expand_tree(Tensor logits, Tensor scores, int width, Tensor? temperatures, "
      "float temperature) -> (Tensor tokens, Tensor scores_out, Tensor frontier)");
  m.def(
      "validate_expand_tree(Tensor logits, Tensor scores, int width, Tensor? temperatures, "
      "float temperature) -> ()");
}
SPECDEC_IMPLEMENT_CPU(expand_tree)
SPECDEC_VALIDATE(expand_tree, check_expand_tree)

}  // namespace
}  // namespace specdec
