#pragma once
#include "cpu/row/distribution.h"

namespace specdec::cpu {

// Whether top-p needs the mass of the whole row.
bool needs_total(const SequenceParams& params, int64_t vocab);

// Sets law.threshold, the smallest surviving logit: top-k, top-p of what is left, min-p; ties
// survive. Lists the survivors if they fit; no sort. scratch as the tiles were read, total if
// needed.
void filter(const RowView& row, const SequenceParams& params, double total, RowStats& stats,
            Scratch& scratch);

}  // namespace specdec::cpu
