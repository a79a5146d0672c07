#include <cstring>
#include <vector>

#include "specdec/kv_compact.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "cpu/kv/slots.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kLine = 64;
// What streams at once: an instruction for each part, so that the processor sees each of them go
// from head to head in steps of one length and reads ahead.
constexpr int64_t kChunk = 4 * kLine;
// In bytes: more than the caches keep until the next forward reads them.
constexpr int64_t kBeyondCaches = 8 * 1024 * 1024;

// Around the caches, so that memory is not read for the sake of lines that are written whole: a
// third of the traffic. Both addresses are those of lines, the size is one of chunks.
void stream_row(char* to, const char* from, int64_t bytes) {
#ifdef __SSE2__
  constexpr int kParts = kChunk / sizeof(__m128i);
  for (int64_t byte = 0; byte < bytes; byte += kChunk) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + byte);
    auto* const target = reinterpret_cast<__m128i*>(to + byte);
    __m128i parts[kParts];
    for (int i = 0; i < kParts; ++i) parts[i] = _mm_load_si128(source + i);
    for (int i = 0; i < kParts; ++i) _mm_stream_si128(target + i, parts[i]);
  }
#else
  std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

bool streams(const KvTensor& t) {
  const uint64_t lines = reinterpret_cast<uintptr_t>(t.cache) | t.cache_stride.sequence |
                         t.cache_stride.head | t.cache_stride.slot;
  return lines % kLine == 0 && t.row_bytes % kChunk == 0;
}

// To the second-level cache.
void prefetch(const char* chunk) {
  for (int64_t byte = 0; byte < kChunk; byte += kLine) __builtin_prefetch(chunk + byte, 0, 2);
}

// All heads of a move before the next one, for the sake of those steps; the next one's rows are on
// their way meanwhile.
void stream_rows(const KvTensor& t, const std::vector<KvMove>& moves) {
  const int64_t step = t.cache_stride.head, bytes = t.row_bytes;
  for (size_t i = 0; i < moves.size(); ++i) {
    char* to = t.cache + moves[i].to;
    const char* from = t.cache + moves[i].from;
    const char* next = t.cache + moves[std::min(i + 1, moves.size() - 1)].from;
    for (int64_t h = 0, heads = t.heads; h < heads; ++h) {
      prefetch(next + h * step);
      stream_row(to + h * step, from + h * step, bytes);
    }
  }
#ifdef __SSE2__
  _mm_sfence();
#endif
}

void move_rows(const KvTensor& t, const std::vector<KvMove>& moves) {
  for (const KvMove& move : moves) {
    for (int64_t h = 0; h < t.heads; ++h) {
      char* const head = t.cache + h * t.cache_stride.head;
      std::memcpy(head + move.to, head + move.from, static_cast<size_t>(t.row_bytes));
    }
  }
}

template <class Slots>
void compact(const KvCompactParams& p, const Slots& slots, const Parallel& parallel) {
  if (p.num_tensors == 0) return;
  // As many tokens in every cache, but in those that are too short.
  int64_t tokens = 0, token_bytes = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    PathMoves<Slots> walk(slots, p.path, p.tensors[0], b, p.base[b]);
    for (KvMove move; walk.next(&move);) ++tokens;
  }
  for (int64_t i = 0; i < p.num_tensors; ++i) {
    token_bytes += p.tensors[i].heads * p.tensors[i].row_bytes;
  }
  const int64_t bytes = tokens * token_bytes;
  const Parallel threads = worth_threads(bytes) ? parallel : serial();
  threads(p.num_tensors * p.batch, [&](int64_t begin, int64_t end) {
    std::vector<KvMove> moves;
    while (begin < end) {
      const int64_t cache = begin / p.batch;
      const KvTensor& t = p.tensors[cache];
      moves.clear();
      for (const int64_t last = std::min(end, (cache + 1) * p.batch); begin < last; ++begin) {
        const int64_t b = begin % p.batch;
        PathMoves<Slots> walk(slots, p.path, t, b, p.base[b]);
        for (KvMove move; walk.next(&move);) moves.push_back(move);
      }
      if (bytes >= kBeyondCaches && streams(t)) {
        stream_rows(t, moves);
      } else {
        move_rows(t, moves);
      }
    }
  });
}

}  // namespace

void kv_compact(const KvCompactParams& p, const Parallel& parallel) {
  compact(p, DenseSlots{}, parallel);
}

void paged_compact(const PagedCompactParams& p, const Parallel& parallel) {
  compact(p.compact, p.slots, parallel);
}

}  // namespace specdec::cpu
