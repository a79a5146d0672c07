#include "torch/arguments/linear.h"

namespace specdec {
namespace {

std::string shape_text(const PanelLayout& layout) {
  std::ostringstream out;
  out << '[' << layout.panels << ", " << layout.steps << ", " << layout.width;
  if (layout.inputs > 1) out << ", " << layout.inputs;
  out << ']';
  return out.str();
}

bool has_shape(const Tensor& t, const PanelLayout& layout) {
  return t.dim() == (layout.inputs > 1 ? 4 : 3) && t.size(0) == layout.panels &&
         t.size(1) == layout.steps && t.size(2) == layout.width &&
         (layout.inputs == 1 || t.size(3) == layout.inputs);
}

}  // namespace

WeightFormat format_of(const Tensor& panels) {
  if (panels.scalar_type() != ScalarType::Byte || panels.dim() != 3) return WeightFormat::kFloats;
  for (int i = 1; i <= static_cast<int>(kLastFormat); ++i) {
    const auto format = static_cast<WeightFormat>(i);
    if (panels.size(2) == block_format(format).bytes() * cpu::panel_width()) return format;
  }
  return WeightFormat::kFloats;
}

PanelLayout layout_of(const Tensor& of, int64_t out_features, int64_t in_features) {
  return {row_dtype(of), out_features, in_features, cpu::panel_width()};
}

void check_panels(const std::string& name, const Tensor& panels, int64_t out_features,
                  int64_t in_features, const Tensor& of, const char* of_name) {
  const BlockFormat block = block_format(format_of(panels));
  const bool blocks = block.file_bytes > 0;
  SPECDEC_CHECK(blocks || panels.scalar_type() == of.scalar_type(), name, " must be ",
                dtype_name(of), ", got ", dtype_name(panels));
  check_same_device(name.c_str(), panels, of, of_name);
  PanelLayout layout = layout_of(of, out_features, in_features);
  if (blocks) {
    SPECDEC_CHECK(in_features % block.inputs == 0, name, " must be of a multiple of ", block.inputs,
                  " inputs in this format, got K = ", in_features);
    layout.steps = in_features / block.inputs;
    layout.width *= block.bytes();
    layout.inputs = 1;
  }
  SPECDEC_CHECK(has_shape(panels, layout), name, " must be ", shape_text(layout),
                " for the instruction set of this process, got ", shape_of(panels));
  SPECDEC_CHECK(panels.is_contiguous(), name, " must be contiguous");
}

}  // namespace specdec
