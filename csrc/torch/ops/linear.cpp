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

WeightFormat checked_format(int64_t format) {
  SPECDEC_CHECK(1 <= format && format <= static_cast<int64_t>(kLastFormat),
                "format must be in [1, ", static_cast<int64_t>(kLastFormat), "], got ", format);
  return static_cast<WeightFormat>(format);
}

// Returns the number of inputs of a row.
int64_t check_pack_blocks(const Tensor& blocks, int64_t format) {
  const BlockFormat block = block_format(checked_format(format));
  SPECDEC_CHECK(blocks.dim() == 2 && blocks.numel() > 0 && blocks.size(1) % block.file_bytes == 0,
                "blocks must be [N, bytes of a row], a multiple of ", block.file_bytes, ", got ",
                shape_of(blocks));
  SPECDEC_CHECK(blocks.scalar_type() == ScalarType::Byte, "blocks must be uint8, got ",
                dtype_name(blocks));
  check_on_cpu("blocks", blocks);
  SPECDEC_CHECK(blocks.is_contiguous(), "blocks must be contiguous, got strides [",
                blocks.stride(0), ", ", blocks.stride(1), "]");
  return blocks.size(1) / block.file_bytes * block.inputs;
}

Tensor pack_blocks(Tensor blocks, int64_t format) {
  const int64_t in_features = check_pack_blocks(blocks, format);
  const BlockFormat block = block_format(checked_format(format));
  const int64_t width = cpu::panel_width(), out_features = blocks.size(0);
  Tensor panels = torch::stable::new_empty(
      blocks,
      {(out_features + width - 1) / width, in_features / block.inputs, width * block.bytes()});
  cpu::pack_blocks({blocks.const_data_ptr(), panels.mutable_data_ptr(), checked_format(format),
                    out_features, in_features},
                   torch_parallel());
  return panels;
}

void check_unpack_blocks(const Tensor& panels, int64_t in_features, int64_t out_features) {
  SPECDEC_CHECK(in_features >= 1, "in_features must be at least 1, got ", in_features);
  SPECDEC_CHECK(out_features >= 1, "out_features must be at least 1, got ", out_features);
  check_entries("out_features", "the weight", "[N, K]", {out_features, in_features});
  check_on_cpu("panels", panels);
  SPECDEC_CHECK(format_of(panels) != WeightFormat::kFloats, "panels must hold blocks, got ",
                dtype_name(panels), " ", shape_of(panels));
  check_panels("panels", panels, out_features, in_features, panels, "panels");
}

Tensor unpack_blocks(Tensor panels, int64_t in_features, int64_t out_features) {
  check_unpack_blocks(panels, in_features, out_features);
  Tensor weight = torch::stable::new_empty(panels, {out_features, in_features}, ScalarType::Float);
  cpu::unpack_blocks({panels.const_data_ptr(), weight.mutable_data_ptr<float>(), format_of(panels),
                      out_features, in_features},
                     torch_parallel());
  return weight;
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
  m.def("pack_blocks(Tensor blocks, int format) -> Tensor");
  m.def("validate_pack_blocks(Tensor blocks, int format) -> ()");
  m.def("unpack_blocks(Tensor panels, SymInt in_features, SymInt out_features) -> Tensor");
  m.def("validate_unpack_blocks(Tensor panels, SymInt in_features, SymInt out_features) -> ()");
  m.def(
      "packed_linear(Tensor x, Tensor panels, SymInt in_features, SymInt out_features, "
      "Tensor? bias) -> Tensor");
  m.def(
      "validate_packed_linear(Tensor x, Tensor panels, SymInt in_features, SymInt out_features, "
      "Tensor? bias) -> ()");
}
SPECDEC_IMPLEMENT_CPU(pack_linear)
SPECDEC_VALIDATE(pack_linear, check_pack_linear)
SPECDEC_IMPLEMENT_CPU(pack_blocks)
SPECDEC_VALIDATE(pack_blocks, check_pack_blocks)
SPECDEC_IMPLEMENT_CPU(unpack_blocks)
SPECDEC_VALIDATE(unpack_blocks, check_unpack_blocks)
SPECDEC_IMPLEMENT_CPU(packed_linear)
SPECDEC_VALIDATE(packed_linear, check_packed_linear)

}  // namespace
}  // namespace specdec
