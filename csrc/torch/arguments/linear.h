#pragma once
// Shared by the bindings of linear layers and of what is made of them.
#include "specdec/linear.h"
#include "torch/launch.h"

namespace specdec {

// That of a weight: the size of a block tells which, because no two are equal. kFloats for floats.
WeightFormat format_of(const Tensor& panels);
// How a weight [out_features, in_features] of the dtype of `of` is packed in this process.
PanelLayout layout_of(const Tensor& of, int64_t out_features, int64_t in_features);
// `panels` must hold such a weight, in the dtype of `of` or in blocks, on the device of `of`.
void check_panels(const std::string& name, const Tensor& panels, int64_t out_features,
                  int64_t in_features, const Tensor& of, const char* of_name);

}  // namespace specdec
