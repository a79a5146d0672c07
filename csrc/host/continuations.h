// What copying drafters share. Terms:
// - context: the last tokens of a text. A match is an earlier place with the same tokens.
// - continuation: a token that follows a match. It was seen `count` times of the `total` times that
//   any token followed the context.
// - cursor: the matches of one context, as the source that found them writes them down.
#pragma once
#include <cstdint>
#include <vector>

namespace specdec::host {

// Estimated probability of a token that followed a context `count` of `total` times. The rest,
// 1 / (total + 1), is left to tokens that never did (method A of Cleary and Witten, Data
// compression using adaptive coding and partial string matching, 1984).
inline double confidence_of(int64_t count, int64_t total) {
  return static_cast<double>(count) / static_cast<double>(total + 1);
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

struct Start {
  const Source* source;
  Cursor cursor;  // matches of the end of the text
};

// Drafts up to `count` different chains of up to `gamma` tokens, and returns how many there are.
// The first takes the most probable continuation at each step. Every other one leaves an earlier
// chain at the most probable place that is left, and then goes on in the same way. Sources come in
// the order of their match's length.
//   tokens      [count, gamma], -1 behind the end of a chain
//   confidence  [count, gamma] of each token after those before it, 0 behind the end
int64_t draft_chains(const std::vector<Start>& starts, int64_t min_match, int64_t gamma,
                     int64_t count, int64_t* tokens, float* confidence);

}  // namespace specdec::host
