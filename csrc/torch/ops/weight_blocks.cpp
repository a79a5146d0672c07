#include "torch/arguments/linear.h"
#include "torch/register.h"

namespace specdec {
namespace {

WeightFormat checked_format(int64_t format) {
  SPECDEC_CHECK(1 <= format && format <= static_cast<int64_t>(kLastFormat),
                "format must be in [1, ", static_cast<int64_t>(kLastFormat), "], got ", format);
  return static_cast<WeightFormat>(format);
}

// Returns the number of inputs of a row.
int64_t check_pack_blocks(const Tensor& blocks, int64_t format) {
  const BlockFormat block = block_format(checked_format(format));
  SPECDEC_CHECK(blocks.dim() == 2 && blocks.size(1) % block.file_bytes == 0,
                "blocks must be [N, bytes of a row], a multiple of ", block.file_bytes, ", got ",
                shape_of(blocks));
  SPECDEC_CHECK(blocks.numel() > 0, "blocks must not be empty, got ", shape_of(blocks));
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
  SPECDEC_CHECK(panels.scalar_type() == ScalarType::Byte, "panels must be uint8, got ",
                dtype_name(panels));
  SPECDEC_CHECK(format_of(panels) != WeightFormat::kFloats, "panels must hold blocks, got ",
                shape_of(panels));
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

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("pack_blocks(Tensor blocks, int format) -> Tensor");
  m.def("validate_pack_blocks(Tensor blocks, int format) -> ()");
  m.def("unpack_blocks(Tensor panels, SymInt in_features, SymInt out_features) -> Tensor");
  m.def("validate_unpack_blocks(Tensor panels, SymInt in_features, SymInt out_features) -> ()");
}
SPECDEC_IMPLEMENT_CPU(pack_blocks)
SPECDEC_VALIDATE(pack_blocks, check_pack_blocks)
SPECDEC_IMPLEMENT_CPU(unpack_blocks)
SPECDEC_VALIDATE(unpack_blocks, check_unpack_blocks)

}  // namespace
}  // namespace specdec
