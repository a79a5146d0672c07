// A suffix automaton over a text that grows (Blumer et al., The smallest automaton recognizing the
// subwords of a text, 1985), with occurrence counts.
//
// A state represents the substrings that end at the same places. Its link leads to the state of the
// longest suffix of them that also ends elsewhere. A text of n tokens has at most 2n states and 3n
// edges.
//
// Counts are exact for contexts of up to max_match tokens with one more token after them: an
// append raises the counts of the text's suffixes of that size, of which there are max_match + 1 at
// most. For all suffixes it would take n steps where a text repeats one token.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/continuations.h"

namespace specdec::host {

class SuffixAutomaton final : public Source {
 public:
  explicit SuffixAutomaton(int64_t max_match);

  // Tokens are in [0, 2^31). Several threads must not append at once, nor one append while others
  // read. Throws std::length_error beyond kLongest tokens.
  void append(const int32_t* tokens, int64_t n);

  // Takes the memory that a text of n tokens may need, so that no append has to move what is there.
  void reserve(int64_t n);

  // The longest context of at most max_match tokens that occurred before the end of the text.
  // Its length is 0 if even the last token is new.
  Cursor match() const;

  // Of equally frequent continuations the one seen last comes first. If more than 1024 different
  // tokens followed a context, those that did so for the first time last are considered. Where the
  // context alone has too few, those of shorter contexts of at least `min_match` tokens follow,
  // with the probability that the longer ones leave to unseen tokens.
  void continuations(const Cursor& cursor, int64_t min_match, int64_t limit,
                     std::vector<Continuation>& out) const override;

  // How often tokens [n] occur; n <= max_match + 1.
  int64_t count(const int32_t* tokens, int64_t n) const;

  // The last min(n, max_match) tokens of the text.
  const std::vector<int32_t>& tail() const { return tail_; }

  int64_t size() const { return size_; }
  int64_t max_match() const { return max_match_; }
  int64_t num_states() const { return static_cast<int64_t>(states_.size()); }
  int64_t bytes() const;

  static constexpr int64_t kLongest = int64_t{1} << 30;

 private:
  static constexpr uint32_t kNone = 0xffffffff;
  static constexpr uint32_t kRoot = 0;

  struct State {
    int32_t length;  // of its longest substring
    uint32_t link;
    uint32_t first_edge;  // head of a list
    uint32_t count;       // occurrences
    uint32_t last;        // where the latest occurrence ends
  };
  struct Edge {
    uint32_t source;
    int32_t token;
    uint32_t target;
    uint32_t next;  // edge of the same state
  };

  uint32_t find_edge(uint32_t state, int32_t token) const;
  void add_edge(uint32_t state, int32_t token, uint32_t target);
  void grow_slots(size_t slots);
  size_t slot_of(uint32_t state, int32_t token) const;
  void append_one(int32_t token);
  uint32_t clone(uint32_t state, int32_t length);
  uint32_t split(uint32_t from, int32_t token, uint32_t edge);
  void count_suffixes(int32_t token);
  uint32_t shortened(uint32_t state, int64_t length) const;

  const int64_t max_match_;
  int64_t size_ = 0;
  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<uint32_t> slots_;  // hash table from (state, token) to an edge
  std::vector<int32_t> tail_;
  uint32_t last_ = kRoot;  // the state of the whole text
  // The state of the text's longest suffix of at most max_match + 1 tokens, and its length.
  uint32_t counted_ = kRoot;
  int64_t counted_length_ = 0;
};

}  // namespace specdec::host
