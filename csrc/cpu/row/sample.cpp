#include "specdec/sample.h"

#include <cmath>

#include "cpu/each_sequence.h"
#include "cpu/row/distribution.h"
#include "specdec/row_stats.h"

namespace specdec::cpu {

void sample(const SampleParams& p, const Parallel& parallel) {
  each_sequence<Scratch>(
      parallel, p.num_rows, p.num_rows * p.vocab,
      [&](int64_t r, const Parallel& inner, Scratch& scratch) {
        p.tokens[r] = -1;
        p.logprobs[r] = 0;
        p.logsumexp[r] = 0;
        p.threshold[r] = 0;
        p.status[r] = 0;
        const SequenceParams params = params_of(p.sampling, r);
        if (!params.in_range()) {
          p.status[r] = kBadParameter;
          return;
        }
        const RowView row(p.logits, r, 0, p.vocab);
        const RowStats stats = measure(row, params, inner, scratch);
        if (!stats.valid) {
          const bool any = allows_any(p.logits.allowed.row(r, 0), p.vocab);
          p.status[r] = any ? kTargetInvalid : kNothingAllowed;
          return;
        }
        const auto seed = static_cast<uint64_t>(p.seeds[r]);
        const auto position = static_cast<uint64_t>(p.positions[r]);
        const int64_t token =
            p.gumbel ? gumbel_argmax(row, stats, scratch, {seed, position, p.stream}, inner)
                     : draw(row, stats, scratch, uniform(seed, position, p.stream));
        p.tokens[r] = token;
        p.logprobs[r] = static_cast<float>(stats.logprob(row, token));
        p.threshold[r] = stats.threshold;
        if (!stats.one_hot) p.logsumexp[r] = row_logsumexp(stats);
      });
}

}  // namespace specdec::cpu
