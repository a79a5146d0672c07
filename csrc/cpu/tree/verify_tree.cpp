#include "cpu/each_sequence.h"
#include "cpu/tree/decide.h"
#include "cpu/tree/traversal.h"
#include "specdec/tree.h"

namespace specdec::cpu {

void verify_tree(const TreeParams& p, const Parallel& parallel) {
  const int64_t work = p.batch * (p.max_depth + 1) * p.vocab;
  each_sequence<TreeScratch>(parallel, p.batch, work,
                             [&](int64_t b, const Parallel& inner, TreeScratch& scratch) {
                               const bool greedy = params_of(p.sampling, b).temperature == 0;
                               if (p.rule == TreeRule::kTraversal && !greedy) {
                                 TraversalVerifier(p, b, inner, scratch).verify();
                               } else {
                                 TopDownVerifier(p, b, inner, scratch).verify();
                               }
                             });
}

}  // namespace specdec::cpu
