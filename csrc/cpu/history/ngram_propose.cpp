#include "specdec/ngram_propose.h"

#include <algorithm>

#include "cpu/each_sequence.h"

namespace specdec::cpu {
namespace {

// Ends are tried from the last one on, so that only a longer match replaces one. A longer match
// also agrees at the token before the one found, which excludes most ends with one comparison.
uint64_t best_match(const NgramProposeParams& p, int64_t b, int64_t length) {
  const int64_t longest = std::min(p.max_ngram, length - 1);
  int64_t best = 0, best_end = 0;
  for (int64_t end = length - 2; best < longest && end >= best; --end) {
    if (p.history.at(b, end - best) != p.history.at(b, length - 1 - best)) continue;
    const int64_t size = match_size(p, b, length, end);
    if (size <= best) continue;
    best = size;
    best_end = end;
  }
  return match_key(best, best_end);
}

struct NoState {};

}  // namespace

void ngram_propose(const NgramProposeParams& p, const Parallel& parallel) {
  each_sequence<NoState>(parallel, p.batch, p.batch * p.columns,
                         [&](int64_t b, const Parallel&, NoState&) {
                           const int64_t length = text_length(p, b);
                           const NgramCopy copy(p, length, best_match(p, b, length));
                           for (int64_t i = 0; i < p.gamma; ++i)
                             p.tokens.set(b * p.gamma + i, copy.token(p, b, i));
                           p.counts[b] = copy.count(p);
                         });
}

}  // namespace specdec::cpu
