// Compiled once per instruction set (SPECDEC_ISA). Nothing here may be an inline function of a
// shared header: the linker would keep one build of it for all processors.
#include "cpu/forward/attention_tile.h"

#include <type_traits>

#include "cpu/forward/element.h"

#define SPECDEC_CAT_(a, b) a##b
#define SPECDEC_CAT(a, b) SPECDEC_CAT_(a, b)

namespace specdec::cpu {
namespace {

#if defined(__AVX512DQ__)
constexpr int kTileRows = 6;  // rows whose sums fit in the registers, with kKeys for each
#elif defined(__AVX2__)
constexpr int kTileRows = 3;
#else
constexpr int kTileRows = 2;
#endif
constexpr int kKeys = 4;        // keys whose products are summed side by side
constexpr int kColumns = 4;     // registers of values that are summed side by side
constexpr int64_t kBlock = 64;  // slots at most; keys or values of a block fit in the cache
constexpr int64_t kBlockBytes = 1 << 14;
constexpr int64_t kMaxRows = 48, kMaxScores = 1 << 18;  // that share a pass over keys and values
constexpr int64_t kChunk = 4 * kLanes;                  // weights that are summed side by side

typedef float Quad __attribute__((vector_size(16)));

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }
inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Element i of each quad of the result: number `which` of the same quads of a and b, one after the
// other.
constexpr int from_quad(int which, int quad) {
  return which < 4 ? 4 * quad + which : kLanes + 4 * quad + which - 4;
}

template <int w0, int w1, int w2, int w3>
inline V shuffle(V a, V b) {
#define SPECDEC_QUAD(q) from_quad(w0, q), from_quad(w1, q), from_quad(w2, q), from_quad(w3, q)
#if defined(__AVX512DQ__)
  return __builtin_shufflevector(a, b, SPECDEC_QUAD(0), SPECDEC_QUAD(1), SPECDEC_QUAD(2),
                                 SPECDEC_QUAD(3));
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, SPECDEC_QUAD(0), SPECDEC_QUAD(1));
#else
  return __builtin_shufflevector(a, b, SPECDEC_QUAD(0));
#endif
#undef SPECDEC_QUAD
}

// The sums of the lanes of four registers.
inline Quad sum_lanes(const V (&v)[kKeys]) {
  const V ab = shuffle<0, 4, 1, 5>(v[0], v[1]) + shuffle<2, 6, 3, 7>(v[0], v[1]);
  const V cd = shuffle<0, 4, 1, 5>(v[2], v[3]) + shuffle<2, 6, 3, 7>(v[2], v[3]);
  const V sums = shuffle<0, 1, 4, 5>(ab, cd) + shuffle<2, 3, 6, 7>(ab, cd);
#if defined(__AVX512DQ__)
  return (__builtin_shufflevector(sums, sums, 0, 1, 2, 3) +
          __builtin_shufflevector(sums, sums, 4, 5, 6, 7)) +
         (__builtin_shufflevector(sums, sums, 8, 9, 10, 11) +
          __builtin_shufflevector(sums, sums, 12, 13, 14, 15));
#elif defined(__AVX2__)
  return __builtin_shufflevector(sums, sums, 0, 1, 2, 3) +
         __builtin_shufflevector(sums, sums, 4, 5, 6, 7);
#else
  return sums;
#endif
}

// Keys or values of a block. The last one is listed again, up to a multiple of kKeys.
template <class Element>
struct List {
  const Element* at[kBlock + kKeys];
  int64_t count;
  int64_t ahead;  // elements from a slot to that of the next block, which is fetched; 0: it is not

  // The processor's own prefetching ends with a page, which some 16 slots fill.
  void fetch_ahead(int64_t k, int64_t size) const {
    if (ahead == 0) return;
    constexpr int64_t kLine = 64 / sizeof(Element);
    for (int64_t d = 0; d < size; d += kLine) __builtin_prefetch(at[k] + ahead + d);
  }
};

// Writes the scores of M rows of queries with the listed keys; up to kKeys - 1 more are written.
template <class Type, int M>
__attribute__((noinline)) void score_rows(const float* query, int64_t stride, int64_t size,
                                          const List<typename Type::Element>& keys, float scale,
                                          float* const* out) {
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t k = 0; k < keys.count; k += kKeys) {
    for (int j = 0; j < kKeys; ++j) keys.fetch_ahead(k + j, size);
    V sums[M][kKeys] = {};
    for (int64_t d = 0; d < whole; d += kLanes) {
      V key[kKeys];
#pragma GCC unroll 8
      for (int j = 0; j < kKeys; ++j) key[j] = Type::widen(keys.at[k + j] + d);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const V q = load<V>(query + m * stride + d);
#pragma GCC unroll 8
        for (int j = 0; j < kKeys; ++j) sums[m][j] = multiply_add(q, key[j], sums[m][j]);
      }
    }
    if (whole < size) {
#pragma GCC unroll 8
      for (int j = 0; j < kKeys; ++j) {
        const V key = widen_part<Type>(keys.at[k + j] + whole, size - whole);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          sums[m][j] = multiply_add(load<V>(query + m * stride + whole), key, sums[m][j]);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) store(out[m] + k, sum_lanes(sums[m]) * scale);
  }
}

// Sums of one row: of the run of keys that has begun, of the runs of a stretch, and of the
// stretches. The lengths are fixed, so that a sum has one order, and few numbers are added at each
// level.
constexpr int64_t kRun = 16, kStretch = 256;
enum Level { kOfRun, kOfStretch, kOfRow, kLevels };

// Adds the sums of a level to those of the next, and begins again with zeros.
template <int M, int C>
inline void close(float* sums, int64_t stride, int64_t size, int level) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* from = sums + m * stride + level * size + c * kLanes;
      store(from + size, load<V>(from + size) + load<V>(from));
      store(from, V{});
    }
  }
}

// Adds to the sums of M rows the listed values, each times its weight. `ordinal` is that of the
// first.
template <class Type, int M, int C>
void add_columns(const List<typename Type::Element>& values, int64_t first, int64_t size,
                 int64_t ordinal, const float* const* weights, float* sums) {
  const int64_t level_size = padded(size, kLanes), stride = kLevels * level_size;
  sums += first;
  for (int64_t k = 0; k < values.count;) {
    const int64_t end = smaller(values.count, k + kRun - (ordinal + k) % kRun);
    V run[M][C];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) run[m][c] = load<V>(sums + m * stride + c * kLanes);
    }
    for (; k < end; ++k) {
      if (first == 0) values.fetch_ahead(k, size);
      V weight[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) weight[m] = every_lane(weights[m][k]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const auto* from = values.at[k] + first + c * kLanes;
        const V value = C > 1 ? Type::widen(from) : widen_up_to<Type>(from, size - first);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) run[m][c] = multiply_add(weight[m], value, run[m][c]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) store(sums + m * stride + c * kLanes, run[m][c]);
    }
    if ((ordinal + k) % kRun == 0) close<M, C>(sums, stride, level_size, kOfRun);
    if ((ordinal + k) % kStretch == 0) close<M, C>(sums, stride, level_size, kOfStretch);
  }
}

template <class Type, int M>
__attribute__((noinline)) void add_values(const List<typename Type::Element>& values, int64_t size,
                                          int64_t ordinal, const float* const* weights,
                                          float* sums) {
  // One row alone needs more sums side by side to hide the latency of an addition.
  constexpr int kSide = M == 1 ? 2 * kColumns : kColumns;
  int64_t d = 0;
  for (; d + kSide * kLanes <= size; d += kSide * kLanes) {
    add_columns<Type, M, kSide>(values, d, size, ordinal, weights, sums);
  }
  for (; d < size; d += kLanes) {
    add_columns<Type, M, 1>(values, d, size, ordinal, weights, sums);
  }
}

template <class Type, int M = kTileRows>
void score_up_to(int64_t rows, const float* query, int64_t stride, int64_t size,
                 const List<typename Type::Element>& keys, float scale, float* const* out) {
  if (rows == M) return score_rows<Type, M>(query, stride, size, keys, scale, out);
  if constexpr (M > 1) score_up_to<Type, M - 1>(rows, query, stride, size, keys, scale, out);
}

template <class Type, int M = kTileRows>
void add_up_to(int64_t rows, const List<typename Type::Element>& values, int64_t size,
               int64_t ordinal, const float* const* weights, float* sums) {
  if (rows == M) return add_values<Type, M>(values, size, ordinal, weights, sums);
  if constexpr (M > 1) add_up_to<Type, M - 1>(rows, values, size, ordinal, weights, sums);
}

// Makes `count` scores weights, and returns their sum. What follows the scores, up to a chunk, is
// overwritten.
float soften(float* scores, int64_t count, float soft_cap) {
  const int64_t end = padded(count, kChunk);
  // The last score again changes no maximum.
  for (int64_t k = count; k < end; ++k) scores[k] = scores[count - 1];
  V highest = V{} - __builtin_inff();
  for (int64_t k = 0; k < end; k += kLanes) {
    V score = load<V>(scores + k);
    if (soft_cap > 0) {
      score = hyperbolic_tangent(score / soft_cap) * soft_cap;
      store(scores + k, score);
    }
    highest = score > highest ? score : highest;
  }
  float maximum = highest[0];
  for (int i = 1; i < kLanes; ++i) maximum = highest[i] > maximum ? highest[i] : maximum;
  for (int64_t k = 0; k < end; k += kLanes) {
    store(scores + k, exponential(load<V>(scores + k) - maximum));
  }
  for (int64_t k = count; k < end; ++k) scores[k] = 0.0f;
  V sums[4] = {};
  for (int64_t k = 0; k < end; k += kChunk) {
    for (int i = 0; i < 4; ++i) sums[i] += load<V>(scores + k + i * kLanes);
  }
  const V sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float total = sum[0];
  for (int i = 1; i < kLanes; ++i) total += sum[i];
  return total;
}

// The rows [first, first + count) of one head of keys.
struct Group {
  int64_t sequence, head, first, count;
  int64_t seen[kMaxRows];  // keys of each row so far
};

// Slots of a block, whose keys or values of `size` floats fit in the first-level cache.
int64_t block_slots(int64_t size) {
  const int64_t fitting = kBlockBytes / (size * static_cast<int64_t>(sizeof(float)));
  return larger(kKeys, smaller(kBlock, fitting / kKeys * kKeys));
}

// Calls f(begin, end, list) for rows [begin, end) of a group that have seen equally many slots and
// see the same ones of a block, at least one, which `list` holds.
template <class Element, class F>
void each_block(const CachedAttentionParams& p, Group& group, const Element* data, int64_t stride,
                int64_t size, F&& f) {
  const int64_t heads = p.heads / p.kv_heads, end = group.first + group.count;
  const int64_t block = block_slots(size);
  const uint8_t* mask =
      p.mask == nullptr ? nullptr : p.mask + group.sequence * p.mask_stride_sequence;
  List<Element> list;
  for (int64_t r = 0; r < group.count; ++r) group.seen[r] = 0;
  for (int64_t slot = 0; slot < p.slots; slot += block) {
    const int64_t slots = smaller(block, p.slots - slot);
    list.ahead = slot + block < p.slots ? block * stride : 0;
    for (int64_t row = group.first; row < end;) {
      int64_t next = end, n = 0;
      const Element* from = data + slot * stride;
      if (mask == nullptr) {
        for (; n < slots; ++n) list.at[n] = from + n * stride;
      } else {
        const uint8_t* visible = mask + row / heads * p.mask_stride_query + slot;
        next = (row / heads + 1) * heads;
        while (next < end && group.seen[next - group.first] == group.seen[row - group.first] &&
               __builtin_memcmp(mask + next / heads * p.mask_stride_query + slot, visible,
                                static_cast<size_t>(slots)) == 0) {
          next += heads;
        }
        next = smaller(next, end);
        for (int64_t s = 0; s < slots; ++s) {
          list.at[n] = from + s * stride;
          n += visible[s] != 0;
        }
      }
      if (n > 0) {
        list.count = n;
        for (int64_t k = n; k % kKeys != 0; ++k) list.at[k] = list.at[n - 1];
        f(row - group.first, next - group.first, list);
        list.ahead = 0;
      }
      for (int64_t r = row - group.first; r < next - group.first; ++r) group.seen[r] += n;
      row = next;
    }
  }
}

// The same numbers as floats, made once for several tiles of rows.
template <class Type>
void widen_list(const List<typename Type::Element>& list, int64_t size, float* out,
                List<float>& wide) {
  wide.count = list.count;
  wide.ahead = 0;
  for (int64_t k = 0; k < list.count; ++k, out += padded(size, kLanes)) {
    list.fetch_ahead(k, size);
    for (int64_t d = 0; d < size; d += kLanes) {
      store(out + d, widen_up_to<Type>(list.at[k] + d, size - d));
    }
    wide.at[k] = out;
  }
  for (int64_t k = list.count; k % kKeys != 0; ++k) wide.at[k] = wide.at[list.count - 1];
}

// How a list is read: what was widened is float32.
template <class Type, class Element>
struct Reader {
  using Of = Type;
};
template <class Type>
struct Reader<Type, float> {
  using Of = Float32;
};

// Calls f(row, rows, where, list) for equally many rows at a time; `where` is the next score of
// each.
template <class Element, class F>
void each_tile(const Group& group, float* scores, int64_t stride, int64_t begin, int64_t end,
               List<Element>& list, F&& f) {
  for (int64_t left = (end - begin + kTileRows - 1) / kTileRows; left > 0; --left) {
    const int64_t rows = (end - begin + left - 1) / left;
    float* where[kTileRows];
    for (int64_t m = 0; m < rows; ++m)
      where[m] = scores + (begin + m) * stride + group.seen[begin + m];
    f(begin, rows, where, list);
    list.ahead = 0;
    begin += rows;
  }
}

// Scores of a row, and what `score_rows` and `soften` write behind them.
int64_t scores_size(const CachedAttentionParams& p) { return padded(p.slots, kChunk) + kChunk; }

int64_t shared_rows(const CachedAttentionParams& p) {
  return larger(2 * kTileRows, smaller(kMaxRows, kMaxScores / larger(p.slots, 1)));
}

int64_t scratch_size(const CachedAttentionParams& p) {
  const int64_t size = padded(p.size, kLanes), value_size = padded(p.value_size, kLanes);
  return shared_rows(p) * (size + kLevels * value_size + scores_size(p)) +
         larger(block_slots(p.size) * size, block_slots(p.value_size) * value_size);
}

template <class Type>
void attend_group(const CachedAttentionParams& p, Group& group, float* scratch) {
  using Element = typename Type::Element;
  const int64_t size = padded(p.size, kLanes), value_size = padded(p.value_size, kLanes);
  const int64_t scores_stride = scores_size(p), heads = p.heads / p.kv_heads;
  float *query = scratch, *sums = query + group.count * size;
  float* scores = sums + group.count * kLevels * value_size;
  float* wide = scores + group.count * scores_stride;
  const auto head_of = [&](int64_t r) { return group.head * heads + (group.first + r) % heads; };
  const auto token_of = [&](int64_t r) { return (group.first + r) / heads; };
  const auto data_of = [&](const void* data, const AttentionStrides& strides) {
    return static_cast<const Element*>(data) + group.sequence * strides.sequence +
           group.head * strides.head;
  };

  for (int64_t r = 0; r < group.count; ++r) {
    const AttentionStrides& strides = p.query_strides;
    const auto* from = static_cast<const Element*>(p.query) + group.sequence * strides.sequence +
                       head_of(r) * strides.head + token_of(r) * strides.token;
    for (int64_t d = 0; d < p.size; d += kLanes) {
      store(query + r * size + d, widen_up_to<Type>(from + d, p.size - d));
    }
  }
  __builtin_memset(sums, 0, static_cast<size_t>(group.count * kLevels * value_size) * sizeof *sums);

  // Calls f as each_tile does, for each block; 16-bit numbers for several tiles are widened first.
  const auto each = [&](const void* data, const AttentionStrides& strides, int64_t entries,
                        auto f) {
    each_block(p, group, data_of(data, strides), strides.token, entries,
               [&](int64_t begin, int64_t end, List<Element>& list) {
                 if (sizeof(Element) == sizeof(float) || end - begin <= kTileRows) {
                   return each_tile(group, scores, scores_stride, begin, end, list, f);
                 }
                 List<float> floats;
                 widen_list<Type>(list, entries, wide, floats);
                 each_tile(group, scores, scores_stride, begin, end, floats, f);
               });
  };
  each(p.keys, p.key_strides, p.size,
       [&](int64_t r, int64_t rows, float* const* out, const auto& keys) {
         using Read = typename Reader<Type, std::decay_t<decltype(*keys.at[0])>>::Of;
         score_up_to<Read>(rows, query + r * size, size, p.size, keys, p.scale, out);
       });
  float normalisers[kMaxRows];
  for (int64_t r = 0; r < group.count; ++r) {
    float* weights = scores + r * scores_stride;
    // Zeros over 1 are the output of a query that sees nothing.
    normalisers[r] = group.seen[r] == 0 ? 1.0f : soften(weights, group.seen[r], p.soft_cap);
  }
  each(p.values, p.value_strides, p.value_size,
       [&](int64_t r, int64_t rows, const float* const* weights, const auto& values) {
         using Read = typename Reader<Type, std::decay_t<decltype(*values.at[0])>>::Of;
         add_up_to<Read>(rows, values, p.value_size, group.seen[r], weights,
                         sums + r * kLevels * value_size);
       });

  for (int64_t r = 0; r < group.count; ++r) {
    auto* out = static_cast<Element*>(p.out) +
                ((group.sequence * p.queries + token_of(r)) * p.heads + head_of(r)) * p.value_size;
    for (int64_t d = 0; d < p.value_size; d += kLanes) {
      Element lanes[kLanes];
      const float* of_row = sums + r * kLevels * value_size + d;
      const V sum = load<V>(of_row + kOfRow * value_size) +
                    (load<V>(of_row + kOfStretch * value_size) + load<V>(of_row));
      Type::narrow(sum / normalisers[r], lanes);
      __builtin_memcpy(out + d, lanes,
                       static_cast<size_t>(smaller(kLanes, p.value_size - d)) * sizeof *out);
    }
  }
}

template <class Type>
void attend(const CachedAttentionParams& p, float* scratch, int64_t begin, int64_t end) {
  const int64_t rows = p.queries * (p.heads / p.kv_heads), most = shared_rows(p);
  while (begin < end) {
    const int64_t head = begin / rows, left = smaller(end, (head + 1) * rows) - begin;
    const int64_t passes = (left + most - 1) / most;
    Group group;
    group.sequence = head / p.kv_heads;
    group.head = head % p.kv_heads;
    group.first = begin % rows;
    group.count = (left + passes - 1) / passes;
    attend_group<Type>(p, group, scratch);
    begin += group.count;
  }
}

}  // namespace

extern const AttentionKernels SPECDEC_CAT(attention_kernels_, SPECDEC_ISA);
const AttentionKernels SPECDEC_CAT(attention_kernels_, SPECDEC_ISA) = {
    scratch_size, {attend<Float32>, attend<BFloat16>, attend<Float16>}};

}  // namespace specdec::cpu
