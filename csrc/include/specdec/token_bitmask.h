#pragma once
// Which tokens a row may give, one bit for each: that of token v is bit v % 32 of word v / 32.
// Grammars write such masks.
#include <cstdint>

#include "specdec/host_device.h"

namespace specdec {

SPECDEC_HD constexpr int64_t bitmask_words(int64_t vocab) { return (vocab + 31) / 32; }

struct TokenBitmask {
  const uint32_t* words;                // [.., bitmask_words(vocab)], null if all are allowed
  int64_t stride_sequence, stride_row;  // words, as those of the rows are elements

  // The words of one row, null if all its tokens are allowed.
  SPECDEC_HD const uint32_t* row(int64_t sequence, int64_t row) const {
    return words == nullptr ? nullptr : words + sequence * stride_sequence + row * stride_row;
  }
};

SPECDEC_HD inline bool is_allowed(const uint32_t* words, int64_t token) {
  return words == nullptr || (words[token / 32] >> (token % 32) & 1) != 0;
}

SPECDEC_HD SPECDEC_NOINLINE inline bool allows_any(const uint32_t* words, int64_t vocab) {
  if (words == nullptr) return true;
  bool any = false;
  SPECDEC_ROLLED
  for (int64_t w = 0; w < vocab / 32 && !any; ++w) any = words[w] != 0;
  // Bits beyond the vocabulary mean nothing.
  return any || (vocab % 32 != 0 && (words[vocab / 32] & ((1u << (vocab % 32)) - 1)) != 0);
}

}  // namespace specdec
