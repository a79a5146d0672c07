#include "specdec/sample.h"

#include <cmath>

#include "cpu/row/distribution.h"
#include "cpu/tasks.h"

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
        if (!params.valid()) {
          p.status[r] = kBadParameter;
          return;
        }
        const RowView row(p.logits, r, 0, p.vocab);
        const RowStats law = measure(row, params, inner, scratch);
        if (!law.finite) {
          p.status[r] = kTargetNotFinite;
          return;
        }
        const auto seed = static_cast<uint64_t>(p.seeds[r]);
        const auto position = static_cast<uint64_t>(p.positions[r]);
        const int64_t token =
            p.gumbel ? gumbel_argmax(row, law, scratch, {seed, position, p.stream}, inner)
                     : draw(row, law, scratch, uniform(seed, position, p.stream));
        p.tokens[r] = token;
        p.logprobs[r] = static_cast<float>(law.logprob(row, token));
        p.threshold[r] = law.threshold;
        if (!law.point) p.logsumexp[r] = static_cast<double>(law.max) * law.inv_t + law.log_sum;
      });
}

}  // namespace specdec::cpu
