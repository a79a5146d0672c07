// The op verify_chain on the CPU. What the words mean:
//   accepted draft   a drafted token that is emitted as it is
//   recovered token  the token drawn from the residual where the first draft was rejected
//   bonus token      the token drawn from the target's last row after every draft was accepted
//   residual         max(P - Q, 0), normalised: it makes up for what rejection took from P
//   row              the logits or probabilities of one position, V numbers
#include "cpu/chain/decide.h"
#include "cpu/tasks.h"

namespace specdec::cpu {

void verify_chain(const ChainParams& p, const Parallel& parallel) {
  const int64_t work = p.batch * (p.gamma + 1) * p.vocab;
  each_sequence<ChainScratch>(parallel, p.batch, work,
                              [&](int64_t b, const Parallel& inner, ChainScratch& scratch) {
                                ChainVerifier(p, b, inner, scratch).verify();
                              });
}

}  // namespace specdec::cpu
