// A text that does not change, searched through its suffix array (Manber and Myers, 1990): the
// places of all its suffixes in ascending order, in which those that begin with the same n-gram lie
// together.
#pragma once
#include <cstdint>
#include <vector>

#include "host/continuations.h"

namespace specdec::host {

// Several threads may search at once. The arrays must outlive it. Entries of `suffixes` outside of
// the text, as in a damaged file, read as the end of the text.
class SuffixArray final : public Source {
 public:
  SuffixArray(const int32_t* tokens, const int32_t* suffixes, int64_t n)
      : tokens_(tokens), suffixes_(suffixes), size_(n) {}

  // The longest end, of at least `min_match` tokens, of context [n] that occurs in the text. Its
  // length is 0 if there is none.
  Cursor match(const int32_t* context, int64_t n, int64_t min_match) const;

  // Continuations that follow fewer than one in kProbes of more than kProbes matches may be left
  // out; all others are found, and their counts are exact.
  void continuations(const Cursor& cursor, int64_t min_match, int64_t limit,
                     std::vector<Continuation>& out) const override;

  // How often tokens [n] occur.
  int64_t count(const int32_t* tokens, int64_t n) const;

  int64_t size() const { return size_; }

 private:
  static constexpr int64_t kProbes = 64;

  int32_t token_at(int64_t rank, int64_t depth) const;
  int compare(int64_t rank, const int32_t* ngram, int64_t n) const;
  int64_t first_of(const int32_t* ngram, int64_t n) const;
  bool occurs(const int32_t* ngram, int64_t n) const;
  Cursor range_of(const int32_t* ngram, int64_t n) const;

  const int32_t* tokens_;    // [n]
  const int32_t* suffixes_;  // [n]
  int64_t size_;
};

}  // namespace specdec::host
