// The op verify_chain on the CPU. specdec/verification.h defines the terms.
#include "cpu/chain/decide.h"
#include "cpu/each_sequence.h"

namespace specdec::cpu {

void verify_chain(const ChainParams& p, const Parallel& parallel) {
  const int64_t work = p.batch * (p.gamma + 1) * p.vocab;
  each_sequence<ChainScratch>(parallel, p.batch, work,
                              [&](int64_t b, const Parallel& inner, ChainScratch& scratch) {
                                ChainVerifier(p, b, inner, scratch).verify();
                              });
}

}  // namespace specdec::cpu
