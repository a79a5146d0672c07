#include "host/sort_suffixes.h"

#include <algorithm>
#include <vector>

namespace specdec::host {
namespace {

// A suffix is small if it comes before the next suffix, else large. A small one after a large one
// is a mark. Once the marks are sorted, a scan sorts the large suffixes and another the small ones.
class InducedSorting {
 public:
  // Symbols [n] are in [0, symbols).
  InducedSorting(const int32_t* text, int32_t n, int32_t symbols, int32_t* out)
      : text_(text), n_(n), out_(out), begins_(static_cast<size_t>(symbols) + 1) {
    small_.assign(n, false);
    for (int32_t i = n - 2; i >= 0; --i) {
      small_[i] = text[i] != text[i + 1] ? text[i] < text[i + 1] : small_[i + 1];
    }
    for (int32_t i = 0; i < n; ++i) ++begins_[text[i] + 1];
    for (int32_t c = 0; c < symbols; ++c) begins_[c + 1] += begins_[c];
    for (int32_t i = 1; i < n; ++i) {
      if (is_mark(i)) marks_.push_back(i);
    }
  }

  void sort(const Progress& progress) {
    progress(0.1);
    induce(marks_);
    progress(0.4);
    sort_marks();
    progress(0.7);
    induce(marks_);
    progress(1);
  }

 private:
  bool is_mark(int32_t i) const { return i > 0 && small_[i] && !small_[i - 1]; }

  // Sorts all suffixes by what the order of the marks tells: completely if they are sorted, else by
  // the piece up to the next mark.
  void induce(const std::vector<int32_t>& marks) {
    std::fill_n(out_, n_, -1);
    std::vector<int32_t> place(begins_.begin() + 1, begins_.end());  // ends of the buckets
    for (size_t k = marks.size(); k-- > 0;) out_[--place[text_[marks[k]]]] = marks[k];
    place.assign(begins_.begin(), begins_.end() - 1);
    out_[place[text_[n_ - 1]]++] = n_ - 1;
    for (int32_t r = 0; r < n_; ++r) {
      const int32_t before = out_[r] - 1;
      if (before >= 0 && !small_[before]) out_[place[text_[before]]++] = before;
    }
    place.assign(begins_.begin() + 1, begins_.end());
    for (int32_t r = n_ - 1; r >= 0; --r) {
      const int32_t before = out_[r] - 1;
      if (before >= 0 && small_[before]) out_[--place[text_[before]]] = before;
    }
  }

  // Names each mark by the rank of its piece, and sorts the text of the names.
  void sort_marks() {
    const int32_t count = static_cast<int32_t>(marks_.size());
    if (count < 2) return;
    std::vector<int32_t> sorted, name_at(static_cast<size_t>(n_) / 2 + 1);
    sorted.reserve(marks_.size());
    for (int32_t r = 0; r < n_; ++r) {
      if (is_mark(out_[r])) sorted.push_back(out_[r]);
    }
    int32_t names = 0;
    for (int32_t k = 0; k < count; ++k) {
      if (k > 0 && !same_piece(sorted[k - 1], sorted[k])) ++names;
      name_at[sorted[k] / 2] = names;  // two marks are never neighbours
    }
    ++names;
    if (names < count) {
      std::vector<int32_t> text(marks_.size());
      for (int32_t k = 0; k < count; ++k) text[k] = name_at[marks_[k] / 2];
      InducedSorting(text.data(), count, names, sorted.data()).sort([](double) {});
      for (int32_t& k : sorted) k = marks_[k];
    }
    marks_.swap(sorted);
  }

  // Whether the pieces from two marks up to and with their next marks are equal.
  bool same_piece(int32_t a, int32_t b) const {
    for (int32_t i = 0;; ++i) {
      if (a + i == n_ || b + i == n_) return false;
      if (text_[a + i] != text_[b + i]) return false;
      if (i > 0 && (is_mark(a + i) || is_mark(b + i))) return is_mark(a + i) && is_mark(b + i);
    }
  }

  const int32_t* text_;
  const int32_t n_;
  int32_t* out_;
  std::vector<int32_t> begins_;  // where the suffixes begin that start with a symbol
  std::vector<bool> small_;
  std::vector<int32_t> marks_;
};

}  // namespace

void sort_suffixes(const int32_t* tokens, int64_t n, int32_t* suffixes, const Progress& progress) {
  progress(0);
  if (n == 0) return;
  // Ids without gaps keep the buckets small.
  std::vector<int32_t> distinct(tokens, tokens + n), symbols(static_cast<size_t>(n));
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  for (int64_t i = 0; i < n; ++i) {
    const auto found = std::lower_bound(distinct.begin(), distinct.end(), tokens[i]);
    symbols[i] = static_cast<int32_t>(found - distinct.begin());
  }
  const int32_t count = static_cast<int32_t>(distinct.size());
  distinct = {};
  InducedSorting(symbols.data(), static_cast<int32_t>(n), count, suffixes).sort(progress);
}

}  // namespace specdec::host
