// What copying drafters share. Terms:
// - context: the last tokens of a text. A match is an earlier place with the same tokens.
// - continuation: a token that follows a match. It was seen `count` times of the `total` times that
//   any token followed the context.
// - cursor: the matches of one context, as the source that found them writes them down.
#pragma once
#include <cstdint>
#include <vector>

namespace specdec::host {

// The weight of tokens that never followed a context of this length, beside the `total` times that
// others did. It is the estimator of Cleary and Witten (Data compression using adaptive coding and
// partial string matching, 1984) with 2 / length in the place of 1: longer matches are trusted
// more. On greedy texts that fits how often drafts are accepted; docs/drafters.md has the figures.
inline double unseen_weight(int64_t length) { return 2.0 / static_cast<double>(length); }

// Estimated probability of a token that followed a context of this length `count` of `total` times.
inline double confidence_of(int64_t count, int64_t total, int64_t length) {
  return static_cast<double>(count) / (static_cast<double>(total) + unseen_weight(length));
}

struct Cursor {
  int64_t begin = 0, end = 0;  // a state of an automaton; or a range of a suffix array
  int64_t length = 0;          // tokens of the context
};

struct Continuation {
  int32_t token;
  double confidence;
  Cursor next;  // the matches of the context with this token
};

// A text that continuations are copied from.
class Source {
 public:
  virtual ~Source() = default;

  // Replaces `out` by up to `limit` continuations with different tokens, the most probable first,
  // of contexts of at least `min_match` tokens.
  virtual void continuations(const Cursor& cursor, int64_t min_match, int64_t limit,
                             std::vector<Continuation>& out) const = 0;
};

}  // namespace specdec::host
