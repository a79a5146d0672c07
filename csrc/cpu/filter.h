#pragma once
#include "cpu/row.h"

namespace specdec {

// The smallest surviving logit: top-k, top-p of what is left, min-p; ties survive. Exact selection
// by radix on the ordered bits, no sort. scratch.blocks as measure left it.
float filter_threshold(const RowView& row, const Params& params, float max, Scratch& scratch);

}  // namespace specdec
