// Chains of drafted tokens from the continuations of one or several texts.
#pragma once
#include <cstdint>
#include <vector>

#include "host/continuations.h"

namespace specdec::host {

struct Start {
  const Source* source;
  Cursor cursor;  // matches of the end of the text
};

struct Wanted {
  int64_t gamma;          // most tokens of a chain
  int64_t count;          // most chains
  int64_t min_match;      // fewest tokens of a context
  double min_confidence;  // a chain ends before the product of its confidences falls below this
};

// Drafts chains that differ within gamma, and returns how many there are; those of a smaller gamma
// need not be the beginnings of these. The first takes the most probable continuation at each step.
// Every other one leaves an earlier chain at the most probable place that is left, and then goes on
// in the same way. Sources come in the order of their match's length.
//   tokens      [count, gamma], -1 after the end of a chain
//   confidence  [count, gamma] of each token after those before it, 0 after the end
int64_t draft_chains(const std::vector<Start>& starts, const Wanted& wanted, int64_t* tokens,
                     float* confidence);

}  // namespace specdec::host
