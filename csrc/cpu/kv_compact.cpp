#include "specdec/kv_compact.h"

#include <cstring>
#include <utility>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "cpu/kv_rows.h"

namespace specdec {
namespace {

constexpr int64_t kLine = 64;
// More than a processor's caches keep until the next forward reads it.
constexpr int64_t kBeyondCaches = 8 * 1024 * 1024;
// Heads between the one that moves and the one whose rows are on their way.
constexpr int64_t kAhead = 4;
constexpr int64_t kLinesAhead = 8;

// Around the caches, so that memory is not read for the sake of lines that are written whole: a
// third of the traffic. Both addresses and the size are whole lines.
void stream_row(char* to, const char* from, int64_t bytes) {
#ifdef __SSE2__
  constexpr int kParts = kLine / sizeof(__m128i);
  for (; bytes > 0; bytes -= kLine, to += kLine, from += kLine) {
    __m128i line[kParts];
    for (int i = 0; i < kParts; ++i) line[i] = _mm_load_si128((const __m128i*)from + i);
    for (int i = 0; i < kParts; ++i) _mm_stream_si128((__m128i*)to + i, line[i]);
  }
#else
  std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

void finish_streams() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

bool whole_lines(const KvTensor& t) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(t.cache) | t.cache_stride.sequence |
                        t.cache_stride.head | t.cache_stride.slot | t.row_bytes;
  return bits % kLine == 0;
}

// The moves of one sequence in one cache.
struct Moves {
  const KvTensor* tensor = nullptr;
  std::vector<KvMove> moves;

  char* head(int64_t h) const { return tensor->cache + h * tensor->cache_stride.head; }

  void prefetch(int64_t h, size_t i) const {
    if (tensor == nullptr || h >= tensor->heads || i >= moves.size()) return;
    const char* const row = head(h) + moves[i].from;
    const int64_t bytes = std::min(tensor->row_bytes, kLinesAhead * kLine);
    for (int64_t byte = 0; byte < bytes; byte += kLine) __builtin_prefetch(row + byte);
  }
};

// The rows lie far apart, so that the processor does not foresee them: they are asked for while
// others move.
void move_rows(const Moves& now, const Moves& next, bool stream) {
  const KvTensor& t = *now.tensor;
  for (int64_t h = 0; h < t.heads; ++h) {
    const bool same = h + kAhead < t.heads;
    const Moves& ahead = same ? now : next;
    const int64_t ahead_head = same ? h + kAhead : h + kAhead - t.heads;
    char* const head = now.head(h);
    for (size_t i = 0; i < now.moves.size(); ++i) {
      const KvMove& move = now.moves[i];
      ahead.prefetch(ahead_head, i);
      if (stream) {
        stream_row(head + move.to, head + move.from, t.row_bytes);
      } else {
        std::memcpy(head + move.to, head + move.from, static_cast<size_t>(t.row_bytes));
      }
    }
  }
}

template <class Slots>
void compact(const KvCompactParams& p, const Slots& slots, const Parallel& parallel) {
  const auto moves_of = [&](int64_t i, Moves* out) {
    out->tensor = &p.tensors[i / p.batch];
    out->moves.clear();
    const int64_t b = i % p.batch;
    PathMoves<Slots> walk(slots, p.path, *out->tensor, b, p.base[b]);
    for (KvMove move; walk.next(&move);) out->moves.push_back(move);
  };
  int64_t bytes = 0;
  for (int64_t i = 0; i < p.num_tensors; ++i) {
    bytes += p.batch * p.path.length * p.tensors[i].heads * p.tensors[i].row_bytes;
  }
  const Parallel threads = worth_threads(bytes) ? parallel : serial();
  threads(p.num_tensors * p.batch, [&](int64_t begin, int64_t end) {
    Moves now, next;
    moves_of(begin, &next);
    for (int64_t i = begin; i < end; ++i) {
      std::swap(now, next);
      if (i + 1 < end)
        moves_of(i + 1, &next);
      else
        next.tensor = nullptr;
      move_rows(now, next, bytes >= kBeyondCaches && whole_lines(*now.tensor));
    }
    finish_streams();
  });
}

}  // namespace

void kv_compact_cpu(const KvCompactParams& p, const Parallel& parallel) {
  compact(p, DenseSlots{}, parallel);
}

void paged_compact_cpu(const PagedCompactParams& p, const Parallel& parallel) {
  compact(p.compact, p.slots, parallel);
}

}  // namespace specdec
