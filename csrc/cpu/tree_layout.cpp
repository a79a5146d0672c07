#include "specdec/tree_layout.h"

#include <algorithm>
#include <cstring>

namespace specdec {
namespace {

// For fewer bytes a thread costs more to wake than its share takes.
bool worth_threads(int64_t bytes) { return bytes >= 256 * 1024; }

}  // namespace

void tree_attention_cpu(const TreeAttentionParams& p, const Parallel& parallel) {
  const int64_t rows = p.nodes + 1;
  const Parallel threads = worth_threads(p.batch * rows * p.slots) ? parallel : serial();
  threads(p.batch * rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t b = r / rows, node = r % rows - 1;
      // No slot is beyond 2^62, and no sum below can overflow.
      const int64_t length = std::clamp<int64_t>(p.lengths[b], 0, int64_t{1} << 62);
      int64_t depth = 0;
      for (int64_t n = node; n >= 0; n = parent_of(p.parents, b, n)) ++depth;
      p.positions[r] = length + depth;
      // Keys at positions below `first` are out of the window.
      const int64_t first = p.window > 0 ? length + depth - p.window + 1 : 0;
      bool* row = p.mask + r * p.slots;
      const int64_t prefix = std::min(length, p.slots);
      const int64_t hidden = std::clamp<int64_t>(first, 0, prefix);
      std::memset(row, 0, hidden);
      std::memset(row + hidden, 1, prefix - hidden);
      std::memset(row + prefix, 0, p.slots - prefix);
      int64_t position = length + depth;
      for (int64_t n = node; position >= std::max(first, length); --position) {
        if (length + 1 + n < p.slots) row[length + 1 + n] = true;
        if (n >= 0) n = parent_of(p.parents, b, n);
      }
    }
  });
}

}  // namespace specdec
