#include "host/suffix_automaton.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace specdec::host {
namespace {

constexpr size_t kFewestSlots = 64;
// More tokens follow a frequent token only, which predicts little, and would take too long.
constexpr size_t kMostFollowers = 1024;

struct Seen {
  int32_t token;
  uint32_t count, last, target;

  bool operator<(const Seen& other) const {  // "comes before"
    return count != other.count ? count > other.count : last > other.last;
  }
};

}  // namespace

SuffixAutomaton::SuffixAutomaton(int64_t max_match) : max_match_(max_match) {
  states_.push_back({0, kNone, kNone, 0, 0});
  grow_slots(kFewestSlots);
  tail_.reserve(static_cast<size_t>(2 * max_match));
}

void SuffixAutomaton::reserve(int64_t n) {
  const size_t tokens = static_cast<size_t>(std::min(n, kLongest));
  states_.reserve(2 * tokens + 1);
  edges_.reserve(3 * tokens);
  size_t slots = slots_.size();
  while (slots < 2 * 3 * tokens) slots *= 2;
  if (slots > slots_.size()) grow_slots(slots);
}

void SuffixAutomaton::append(const int32_t* tokens, int64_t n) {
  if (n > kLongest - size_) {
    throw std::length_error("an automaton must hold at most " + std::to_string(kLongest) +
                            " tokens, got " + std::to_string(size_) + " and " + std::to_string(n) +
                            " more");
  }
  for (int64_t i = 0; i < n; ++i) append_one(tokens[i]);
  const int64_t kept = std::min(max_match_, n);
  tail_.insert(tail_.end(), tokens + n - kept, tokens + n);
  if (static_cast<int64_t>(tail_.size()) > max_match_) {
    tail_.erase(tail_.begin(), tail_.end() - max_match_);
  }
}

void SuffixAutomaton::append_one(int32_t token) {
  ++size_;
  const uint32_t current = static_cast<uint32_t>(states_.size());
  states_.push_back({static_cast<int32_t>(size_), kRoot, kNone, 0, 0});
  uint32_t p = last_, edge = kNone;
  for (; p != kNone && (edge = find_edge(p, token)) == kNone; p = states_[p].link) {
    add_edge(p, token, current);
  }
  if (p != kNone) states_[current].link = split(p, token, edge);
  last_ = current;
  count_suffixes(token);
}

// The state of the suffix that the edge leads to, made one of its own where longer substrings share
// it that do not end here.
uint32_t SuffixAutomaton::split(uint32_t from, int32_t token, uint32_t edge) {
  const uint32_t whole = edges_[edge].target;
  const int32_t length = states_[from].length + 1;
  if (states_[whole].length == length) return whole;
  const uint32_t part = clone(whole, length);
  for (uint32_t p = from; p != kNone; p = states_[p].link) {
    const uint32_t e = find_edge(p, token);
    if (edges_[e].target != whole) break;
    edges_[e].target = part;
  }
  states_[whole].link = part;
  return part;
}

uint32_t SuffixAutomaton::clone(uint32_t state, int32_t length) {
  const uint32_t copy = static_cast<uint32_t>(states_.size());
  states_.push_back(states_[state]);
  states_[copy].length = length;
  states_[copy].first_edge = kNone;
  for (uint32_t e = states_[state].first_edge; e != kNone; e = edges_[e].next) {
    add_edge(copy, edges_[e].token, edges_[e].target);
  }
  return copy;
}

void SuffixAutomaton::count_suffixes(int32_t token) {
  counted_ = edges_[find_edge(counted_, token)].target;
  counted_length_ = std::min(counted_length_ + 1, max_match_ + 1);
  counted_ = shortened(counted_, counted_length_);
  for (uint32_t s = counted_; s != kRoot; s = states_[s].link) {
    ++states_[s].count;
    states_[s].last = static_cast<uint32_t>(size_);
  }
}

// The state of the suffix of `length` tokens of the substrings of a state.
uint32_t SuffixAutomaton::shortened(uint32_t state, int64_t length) const {
  while (state != kRoot && states_[states_[state].link].length >= length) {
    state = states_[state].link;
  }
  return state;
}

Cursor SuffixAutomaton::match() const {
  const int64_t length = std::min(counted_length_, max_match_);
  const uint32_t state = shortened(counted_, length);
  if (states_[state].count > 1) return {state, 0, length};
  if (state == kRoot) return {};
  const uint32_t link = states_[state].link;
  return {link, 0, states_[link].length};
}

void SuffixAutomaton::continuations(const Cursor& cursor, int64_t min_match, int64_t limit,
                                    std::vector<Continuation>& out) const {
  out.clear();
  std::vector<Seen> seen;
  int64_t length = std::min(cursor.length, max_match_);
  uint32_t state = shortened(static_cast<uint32_t>(cursor.begin), length);
  double left = 1;
  while (length >= min_match) {
    int64_t total = 0;
    seen.clear();
    uint32_t e = states_[state].first_edge;
    for (; e != kNone && seen.size() < kMostFollowers; e = edges_[e].next) {
      const State& target = states_[edges_[e].target];
      seen.push_back({edges_[e].token, target.count, target.last, edges_[e].target});
      total += target.count;
    }
    // So many at most are there already, or wanted.
    const size_t first = std::min(seen.size(), static_cast<size_t>(limit));
    std::partial_sort(seen.begin(), seen.begin() + first, seen.end());
    seen.resize(first);
    for (const Seen& s : seen) {
      const bool known = std::any_of(out.begin(), out.end(),
                                     [&](const Continuation& c) { return c.token == s.token; });
      if (known || static_cast<int64_t>(out.size()) == limit) continue;
      out.push_back(
          {s.token, left * confidence_of(s.count, total, length), {s.target, 0, length + 1}});
    }
    if (static_cast<int64_t>(out.size()) == limit || state == kRoot) return;
    left *= 1 - confidence_of(total, total, length);
    state = states_[state].link;
    length = states_[state].length;
  }
}

int64_t SuffixAutomaton::count(const int32_t* tokens, int64_t n) const {
  uint32_t state = kRoot;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t edge = find_edge(state, tokens[i]);
    if (edge == kNone) return 0;
    state = edges_[edge].target;
  }
  return n == 0 ? size_ : states_[state].count;
}

int64_t SuffixAutomaton::bytes() const {
  return static_cast<int64_t>(
      sizeof(*this) + states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) +
      slots_.capacity() * sizeof(uint32_t) + tail_.capacity() * sizeof(int32_t));
}

// Where the search for an edge begins in the table.
size_t SuffixAutomaton::slot_of(uint32_t state, int32_t token) const {
  uint64_t key = static_cast<uint64_t>(state) << 32 | static_cast<uint32_t>(token);
  key = (key ^ key >> 29) * 0x9e3779b97f4a7c15;  // 2^64 / golden ratio
  return (key >> 32) & (slots_.size() - 1);
}

uint32_t SuffixAutomaton::find_edge(uint32_t state, int32_t token) const {
  for (size_t slot = slot_of(state, token);; slot = (slot + 1) & (slots_.size() - 1)) {
    const uint32_t e = slots_[slot];
    if (e == kNone || (edges_[e].source == state && edges_[e].token == token)) return e;
  }
}

void SuffixAutomaton::add_edge(uint32_t state, int32_t token, uint32_t target) {
  if (2 * (edges_.size() + 1) > slots_.size()) grow_slots(2 * slots_.size());
  size_t slot = slot_of(state, token);
  while (slots_[slot] != kNone) slot = (slot + 1) & (slots_.size() - 1);
  slots_[slot] = static_cast<uint32_t>(edges_.size());
  edges_.push_back({state, token, target, states_[state].first_edge});
  states_[state].first_edge = slots_[slot];
}

void SuffixAutomaton::grow_slots(size_t slots) {
  slots_.assign(slots, kNone);
  for (size_t e = 0; e < edges_.size(); ++e) {
    size_t slot = slot_of(edges_[e].source, edges_[e].token);
    while (slots_[slot] != kNone) slot = (slot + 1) & (slots - 1);
    slots_[slot] = static_cast<uint32_t>(e);
  }
}

}  // namespace specdec::host
