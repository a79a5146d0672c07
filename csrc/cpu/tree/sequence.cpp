#include "cpu/tree/sequence.h"

#include <algorithm>
#include <cmath>

namespace specdec::cpu {

bool TreeSequence::open_tree() {
  const int64_t rows = open(p_.rule == TreeRule::kGreedy, p_.nodes + 1);
  if (rows == 0) return false;
  if (!read_nodes(rows - 1)) status_ |= kDraftOutOfRange;
  max_tokens_ = p_.max_new_tokens != nullptr ? std::max<int64_t>(0, p_.max_new_tokens[b_]) : rows;
  return max_tokens_ > 0;
}

bool TreeSequence::read_nodes(int64_t n) {
  bool valid = true;
  nodes_.clear(n);
  while (--n >= 0) {
    const int64_t x = drafted(n);
    const int64_t parent = id_at(p_.parents, p_.parents_are_int64,
                                 b_ * p_.stride_parent_sequence + n * p_.stride_parent);
    if (parent < kRoot || parent >= n || x < kNone || x >= p_.id_limit()) {
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
  const int64_t* end = p_.eos_token_ids + p_.num_eos;
  return depth == max_tokens_ ||
         (depth > 0 && std::find(p_.eos_token_ids, end, token(node)) != end);
}

void TreeSequence::accept(int64_t depth, int64_t node, double logprob) const {
  put_id(p_.path, p_.parents_are_int64, b_ * p_.max_depth + depth, node);
  write(depth, token(node), logprob);
  ++p_.num_accepted[b_];
}

}  // namespace specdec::cpu
