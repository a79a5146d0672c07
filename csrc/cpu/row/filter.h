#pragma once
// Filters are thresholds on the raw logits of a row; nothing is sorted.
#include "cpu/row/distribution.h"

namespace specdec::cpu {

// Whether top-p needs the mass of the whole row.
bool needs_total(const SequenceParams& params, int64_t vocab);

// Sets stats.threshold, the smallest logit that survives top-k, then top-p among the survivors,
// then min-p; ties survive. Lists the survivors if they fit. `scratch` holds the maxima of tiles
// and strips; `total` is the mass of the row if that is needed.
void filter(const RowView& row, const SequenceParams& params, double total, RowStats& stats,
            Scratch& scratch);

}  // namespace specdec::cpu
