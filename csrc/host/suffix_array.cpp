#include "host/suffix_array.h"

#include <algorithm>

namespace specdec::host {
namespace {

// The first number in [begin, end) that `before` is false for.
template <class Before>
int64_t partition_point(int64_t begin, int64_t end, const Before& before) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (before(middle)) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

}  // namespace

// The token of a suffix, -1 after its end.
int32_t SuffixArray::token_at(int64_t rank, int64_t depth) const {
  const int64_t begin = suffixes_[rank];
  return begin >= 0 && begin < size_ - depth ? tokens_[begin + depth] : -1;
}

// Below 0 if the first n tokens of a suffix come before the n-gram, above 0 if after it.
int SuffixArray::compare(int64_t rank, const int32_t* ngram, int64_t n) const {
  for (int64_t i = 0; i < n; ++i) {
    const int32_t token = token_at(rank, i);
    if (token != ngram[i]) return token < ngram[i] ? -1 : 1;
  }
  return 0;
}

int64_t SuffixArray::first_of(const int32_t* ngram, int64_t n) const {
  return partition_point(0, size_, [&](int64_t rank) { return compare(rank, ngram, n) < 0; });
}

bool SuffixArray::occurs(const int32_t* ngram, int64_t n) const {
  const int64_t first = first_of(ngram, n);
  return first < size_ && compare(first, ngram, n) == 0;
}

Cursor SuffixArray::range_of(const int32_t* ngram, int64_t n) const {
  const int64_t first = first_of(ngram, n);
  const int64_t end =
      partition_point(first, size_, [&](int64_t rank) { return compare(rank, ngram, n) == 0; });
  return {first, end, n};
}

Cursor SuffixArray::match(const int32_t* context, int64_t n, int64_t min_match) const {
  // If an n-gram occurs, so do its ends.
  const int64_t longest =
      partition_point(min_match, n + 1,
                      [&](int64_t length) { return occurs(context + n - length, length); }) -
      1;
  return longest < min_match ? Cursor{} : range_of(context + n - longest, longest);
}

void SuffixArray::continuations(const Cursor& cursor, int64_t min_match, int64_t limit,
                                std::vector<Continuation>& out) const {
  out.clear();
  if (cursor.length < min_match) return;
  const int64_t depth = cursor.length;
  // A match at the end of the text comes first, and nothing follows it.
  const int64_t begin = partition_point(cursor.begin, cursor.end,
                                        [&](int64_t rank) { return token_at(rank, depth) < 0; });
  const int64_t total = cursor.end - begin, probes = std::min(total, kProbes);
  int64_t rest = begin;  // after the tokens that were found
  for (int64_t i = 0; i < probes; ++i) {
    const int64_t rank = begin + i * total / probes;
    if (rank < rest) continue;
    const int32_t token = token_at(rank, depth);
    if (token < 0) continue;  // a damaged file
    const int64_t first =
        partition_point(rest, rank, [&](int64_t other) { return token_at(other, depth) != token; });
    rest = partition_point(rank, cursor.end,
                           [&](int64_t other) { return token_at(other, depth) == token; });
    out.push_back({token, confidence_of(rest - first, total, depth), {first, rest, depth + 1}});
  }
  std::stable_sort(out.begin(), out.end(), [](const Continuation& a, const Continuation& b) {
    return a.confidence > b.confidence;
  });
  if (static_cast<int64_t>(out.size()) > limit) out.resize(static_cast<size_t>(limit));
}

int64_t SuffixArray::count(const int32_t* tokens, int64_t n) const {
  const Cursor range = range_of(tokens, n);
  return range.end - range.begin;
}

}  // namespace specdec::host
