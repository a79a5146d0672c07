#include "specdec/apply_penalties.h"

#include "cpu/each_sequence.h"

namespace specdec::cpu {
namespace {

struct Nothing {};

// Calls f for the tokens [begin, end) that the text of a sequence holds.
template <class F>
void each_token_of_text(const PenaltyParams& p, int64_t b, int64_t begin, int64_t end, F&& f) {
  const int32_t* const counts = p.counts == nullptr ? nullptr : p.counts + b * p.stride_counts;
  const uint32_t* const prompt = p.prompt.row(b, 0);
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t last = first + 32 < end ? first + 32 : end;
    bool some = prompt != nullptr && prompt[first / 32] != 0;
    for (int64_t token = first; counts != nullptr && token < last; ++token)
      some |= counts[token] > 0;
    if (!some) continue;
    for (int64_t token = first; token < last; ++token) f(token);
  }
}

}  // namespace

void apply_penalties(const PenaltyParams& p, const Parallel& parallel) {
  each_sequence<Nothing>(
      parallel, p.batch, p.batch * p.vocab, [&](int64_t b, const Parallel& inner, Nothing&) {
        const PenalisedSequence s = open_penalties(p, b);
        const int64_t words = bitmask_words(p.vocab);
        inner(words, [&](int64_t begin, int64_t end) {
          const int64_t first = begin * 32, last = end == words ? p.vocab : end * 32;
          if (!s.in_range()) {
            for (int64_t token = first; token < last; ++token) apply_to_token(p, s, token);
            return;
          }
          each_token_of_text(p, b, first, last,
                             [&](int64_t token) { apply_to_token(p, s, token); });
        });
        if (!s.in_range()) return;
        for (int64_t k = 0; k < p.named(); ++k) apply_to_named(p, s, k);
      });
}

}  // namespace specdec::cpu
