#include <cstring>
#include <vector>

#include "specdec/kv_compact.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "cpu/kv/slots.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kCacheLine = 64;
// Bytes that are streamed by one iteration, with an instruction of its own for each part. So each
// instruction goes from head to head in equal steps, which the processor's prefetcher recognises.
constexpr int64_t kChunk = 4 * kCacheLine;
// Moves of more bytes than this bypass the processor's caches, which would have lost them anyway by
// the time that the next forward reads them.
constexpr int64_t kStreamFrom = 8 * 1024 * 1024;

// Stores that bypass the processor's caches do not first read the lines that they overwrite, which
// saves a third of the memory traffic. Both addresses must be aligned to cache lines, and the size
// must be a multiple of kChunk.
void stream_entry(char* to, const char* from, int64_t bytes) {
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

bool can_stream(const KvTensor& t) {
  const uint64_t lines = reinterpret_cast<uintptr_t>(t.cache) | t.cache_stride.sequence |
                         t.cache_stride.head | t.cache_stride.slot;
  return lines % kCacheLine == 0 && t.entry_bytes % kChunk == 0;
}

// Into the second-level cache.
void prefetch(const char* chunk) {
  for (int64_t byte = 0; byte < kChunk; byte += kCacheLine) __builtin_prefetch(chunk + byte, 0, 2);
}

// Moves all heads of one token before the next token, in equal steps for the prefetcher, and
// prefetches the next token meanwhile.
void stream_slots(const KvTensor& t, const std::vector<KvMove>& moves) {
  const int64_t step = t.cache_stride.head, bytes = t.entry_bytes;
  for (size_t i = 0; i < moves.size(); ++i) {
    char* to = t.cache + moves[i].to;
    const char* from = t.cache + moves[i].from;
    const char* next = t.cache + moves[std::min(i + 1, moves.size() - 1)].from;
    for (int64_t h = 0, heads = t.heads; h < heads; ++h) {
      prefetch(next + h * step);
      stream_entry(to + h * step, from + h * step, bytes);
    }
  }
#ifdef __SSE2__
  _mm_sfence();
#endif
}

void move_slots(const KvTensor& t, const std::vector<KvMove>& moves) {
  for (const KvMove& move : moves) {
    for (int64_t h = 0; h < t.heads; ++h) {
      char* const head = t.cache + h * t.cache_stride.head;
      std::memcpy(head + move.to, head + move.from, static_cast<size_t>(t.entry_bytes));
    }
  }
}

template <class Slots>
void compact(const KvCompactParams& p, const Slots& slots, const Parallel& parallel) {
  if (p.num_tensors == 0) return;
  // An estimate from the first cache: others move as many tokens, unless they have fewer slots.
  int64_t tokens = 0, token_bytes = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    PathMoves<Slots> steps(slots, p.path, p.tensors[0], b, p.base[b]);
    for (KvMove move; steps.next(&move);) ++tokens;
  }
  for (int64_t i = 0; i < p.num_tensors; ++i) {
    token_bytes += p.tensors[i].heads * p.tensors[i].entry_bytes;
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
        PathMoves<Slots> steps(slots, p.path, t, b, p.base[b]);
        for (KvMove move; steps.next(&move);) moves.push_back(move);
      }
      if (bytes >= kStreamFrom && can_stream(t)) {
        stream_slots(t, moves);
      } else {
        move_slots(t, moves);
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
