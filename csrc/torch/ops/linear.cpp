#include "torch/arguments/linear.h"

#include "torch/register.h"

namespace specdec {
namespace {

void check_pack_linear(const Tensor& weight) {
  SPECDEC_CHECK(weight.dim() == 2, "weight must be [N, K], got ", shape_of(weight));
  check_floats("weight", weight);
  check_on_cpu("weight", weight);
  SPECDEC_CHECK(weight.numel() > 0, "weight must not be empty, got ", shape_of(weight));
  SPECDEC_CHECK(weight.is_contiguous(), "weight must be contiguous, got strides [",
                weight.stride(0), ", ", weight.stride(1), "]");
}

Tensor pack_linear(Tensor weight) {
  check_pack_linear(weight);
  const int64_t out_features = weight.size(0), in_features = weight.size(1);
  const PanelLayout layout = layout_of(weight, out_features, in_features);
  const int64_t sizes[] = {layout.panels, layout.steps, layout.width, layout.inputs};
  Tensor panels = torch::stable::new_empty(
      weight, torch::headeronly::IntHeaderOnlyArrayRef(sizes, layout.inputs > 1 ? 4 : 3));
  const PackLinearParams p = {weight.const_data_ptr(), panels.mutable_data_ptr(), row_dtype(weight),
                              out_features, in_features};
  cpu::pack_linear(p, torch_parallel());
  return panels;
}

void check_packed_linear(const Tensor& x, const Tensor& panels, int64_t in_features,
                         int64_t out_features, const std::optional<Tensor>& bias) {
  SPECDEC_CHECK(in_features >= 1, "in_features must be at least 1, got ", in_features);
  SPECDEC_CHECK(out_features >= 1, "out_features must be at least 1, got ", out_features);
  SPECDEC_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) == in_features,
                "x must be [..., K] with K = ", in_features, ", got ", shape_of(x));
  check_floats("x", x);
  check_on_cpu("x", x);
  check_entries("out_features", "the weight", "[N, K]", {out_features, in_features});
  check_panels("panels", panels, out_features, in_features, x, "x");
  if (bias) check_vector("bias", *bias, out_features, x.scalar_type(), x, "x");
}

Tensor packed_linear(Tensor x, Tensor panels, int64_t in_features, int64_t out_features,
                     std::optional<Tensor> bias) {
  check_packed_linear(x, panels, in_features, out_features, bias);
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) sizes.push_back(x.size(i));
  sizes.push_back(out_features);
  Tensor y = torch::stable::new_empty(x, sizes);
  x = dense(x);
  if (bias) bias = dense(*bias);
  const PackedWeight weight = {panels.const_data_ptr(), format_of(panels),
                               bias ? bias->const_data_ptr() : nullptr, out_features};
  const PackedLinearParams p = {x.const_data_ptr(),       weight,
                                y.mutable_data_ptr(),     row_dtype(x),
                                y.numel() / out_features, in_features};
  cpu::packed_linear(p, torch_parallel());
  return y;
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("pack_linear(Tensor weight) -> Tensor");
  m.def("validate_pack_linear(Tensor weight) -> ()");
  m.def(
      "packed_linear(Tensor x, Tensor panels, SymInt in_features, SymInt out_features, "
      "Tensor? bias) -> Tensor");
  m.def(
      "validate_packed_linear(Tensor x, Tensor panels, SymInt in_features, SymInt out_features, "
      "Tensor? bias) -> ()");
}
SPECDEC_IMPLEMENT_CPU(pack_linear)
SPECDEC_VALIDATE(pack_linear, check_pack_linear)
SPECDEC_IMPLEMENT_CPU(packed_linear)
SPECDEC_VALIDATE(packed_linear, check_packed_linear)

}  // namespace
}  // namespace specdec
