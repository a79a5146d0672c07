#include "cpu/tree/sequence.h"

#include <cmath>

namespace specdec::cpu {

bool TreeSequence::open_tree() {
  const int64_t rows = open(p_.rule == TreeRule::kGreedy, p_.nodes + 1);
  if (rows == 0) return false;
  if (!read_nodes(rows - 1)) status_ |= kDraftOutOfRange;
  max_tokens_ = most_new_tokens(p_, state_);
  return max_tokens_ > 0;
}

bool TreeSequence::read_nodes(int64_t n) {
  bool valid = true;
  nodes_.clear(n);
  while (--n >= 0) {
    const int64_t x = drafted(n);
    const int64_t parent = p_.parent(b_, n);
    if (!p_.valid_node(n, x, parent)) {
      valid = false;
    } else if (x != kNone) {
      nodes_.add(n, x, parent);
    }
  }
  return valid;
}

void TreeSequence::clear() const {
  for (int64_t d = 0; d <= p_.max_depth; ++d) write(d, kNone, 0);
  for (int64_t d = 0; d < p_.max_depth; ++d) {
    put_id(p_.path, p_.parents_are_int64, b_ * p_.max_depth + d, kNone);
  }
  for (int64_t n = 0; n < p_.nodes; ++n) record_accept_prob(n, NAN);
  p_.num_accepted[b_] = 0;
}

bool TreeSequence::ends_at(int64_t depth, int64_t node) const {
  return depth == max_tokens_ || (depth > 0 && is_eos(p_, token(node)));
}

void TreeSequence::accept(int64_t depth, int64_t node, double logprob) const {
  put_id(p_.path, p_.parents_are_int64, b_ * p_.max_depth + depth, node);
  write(depth, token(node), logprob);
  ++p_.num_accepted[b_];
}

}  // namespace specdec::cpu
