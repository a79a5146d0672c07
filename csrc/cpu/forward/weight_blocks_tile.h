#pragma once
// Floats of the blocks of a panel. Only linear_tile.cpp includes it, once per instruction set.
//
// A value is scale * q, or scale * q + minimum, q an integer of at most 8 bits. The product has at
// most 24 significant bits, so it is exact, and fusing it with the sum rounds as two operations do.
#include <utility>

#include "cpu/forward/float_register.h"
#include "cpu/forward/linear_tile.h"

namespace specdec::cpu {
namespace {

typedef int32_t I __attribute__((vector_size(kRegister)));

// The compiler's own conversion takes ten times as long.
inline V signed_bytes(const void* p) {
#if defined(__AVX512DQ__)
  return __builtin_convertvector((I)_mm512_maskz_cvtepi8_epi32(0xffff, load<__m128i>(p)), V);
#elif defined(__AVX2__)
  return __builtin_convertvector((I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), V);
#else
  typedef int8_t B __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(__builtin_convertvector(load<B>(p), I), V);
#endif
}

// Floats of the lowest `bits` bits of each lane, less `bias`.
template <int bits, int bias>
struct Lookup {
#if defined(__AVX512DQ__)
  // The instructions that look up ignore higher bits. The unmasked form of one trips
  // -Wmaybe-uninitialized in GCC 12.
  V tables[2];
  Lookup() {
    alignas(64) static constexpr float kNumbers[] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                                     11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                                     22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    for (int i = 0; i < 2; ++i) {
      tables[i] = load<V>(kNumbers + i * kLanes) - static_cast<float>(bias);
    }
  }
  V operator()(U q) const {
    if constexpr (bits == 4)
      return (V)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)q, (__m512)tables[0]);
    if constexpr (bits == 5) {
      return (V)_mm512_permutex2var_ps((__m512)tables[0], (__m512i)q, (__m512)tables[1]);
    }
    return converted(q);
  }
#else
  V operator()(U q) const { return converted(q); }
#endif
  static V converted(U q) {
    return __builtin_convertvector((I)(q & ((1u << bits) - 1)), V) - static_cast<float>(bias);
  }
};

// The blocks of a panel, one after the other.
template <WeightFormat kFormat>
class Blocks {
 public:
  static constexpr BlockFormat kBlock = block_format(kFormat);
  static constexpr int64_t kPartInputs = kBlock.inputs / (kBlock.scales > 0 ? kBlock.scales : 1);

  explicit Blocks(const char* from) : from_(from) {}

  // Fetches a block that comes later; beside an unpacked one the cache has no room for it.
  void prefetch() const {
    for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(from_ + kAhead + line);
  }

  // Calls f(input of the block, weights of both registers) for every input of a block, and
  // g(input) behind every 16th, then goes on to the next block.
  template <class F, class G>
  void each_input(F&& f, G&& g) {
    for (int64_t k = 0; k < kBlock.inputs;) {
      open_part(k / kPartInputs);
      for (const int64_t end = k + kPartInputs; k < end; k += 16) {
        eight(k, f);
        eight(k + 8, f);
        g(k + 15);
      }
    }
    from_ += kBytes;
  }

 private:
  static constexpr int64_t kBytes = kBlock.bytes() * kWidth, kAhead = 4096;
  static constexpr int64_t kScales = (kBlock.has_minimum ? 4 : 2) * kWidth;
  static constexpr int64_t kMinima = kScales + kBlock.scales * kWidth;
  static constexpr int64_t kValues = kMinima + (kBlock.has_minimum ? kBlock.scales : 0) * kWidth;
  static constexpr int64_t kAbove = kValues + kBlock.inputs / 2 * kWidth;
  static constexpr int kHigh =
      kBlock.bits > 4 && kBlock.bits < 8 ? static_cast<int>(kBlock.bits) - 4 : 0;

  void open_part(int64_t part) {
    for (int r = 0; r < 2; ++r) {
      const auto* const halves = reinterpret_cast<const uint16_t*>(from_) + r * kLanes;
      scale_[r] = from_float16(halves);
      if constexpr (kBlock.has_minimum) minimum_[r] = from_float16(halves + kWidth);
      if constexpr (kBlock.scales > 0) {  // those of parts with minima are below 64
        const char* const at = from_ + part * kWidth + r * kLanes;
        scale_[r] = scale_[r] * signed_bytes(at + kScales);
        if constexpr (kBlock.has_minimum) minimum_[r] = -(minimum_[r] * signed_bytes(at + kMinima));
      }
    }
  }

  V weight(V q, int r) const {
    return kBlock.has_minimum ? multiply_add(scale_[r], q, minimum_[r]) : scale_[r] * q;
  }

  template <class F>
  void eight(int64_t k, F&& f) const {
    if constexpr (kBlock.bits == 8) {
      const char* const bytes = from_ + kValues + k * kWidth;
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const char* const at = bytes + i * kWidth;
        f(k + i, weight(signed_bytes(at), 0), weight(signed_bytes(at + kLanes), 1));
      }
    } else {
      const auto word = [&](int64_t at, int64_t i, int r) {
        return load<U>(from_ + at + (i * kWidth + r * kLanes) * 4);
      };
      U low[2], above[2];
      for (int r = 0; r < 2; ++r) {
        low[r] = word(kValues, k / 8, r);
        if constexpr (kHigh > 0) above[r] = word(kAbove, k * kHigh / 32, r) >> k * kHigh % 32;
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        V w[2];
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r) {
          U q = low[r] >> 4 * i;
          if constexpr (kHigh > 0) q = (q & 15u) | (above[r] >> kHigh * i) << 4;
          w[r] = weight(lookup_(q), r);
        }
        f(k + i, w[0], w[1]);
      }
    }
  }

  const char* from_;
  Lookup<4 + kHigh, kBlock.bias> lookup_{};
  V scale_[2] = {}, minimum_[2] = {};
};

template <WeightFormat kFormat>
void unpack_blocks(const char* from, int64_t inputs, float* out) {
  using Format = Blocks<kFormat>;
  Format blocks(from);
  for (const float* end = out + inputs * kWidth; out < end; out += Format::kBlock.inputs * kWidth) {
    blocks.each_input(
        [&](int64_t k, V w0, V w1) {
          store(out + k * kWidth, w0);
          store(out + k * kWidth + kLanes, w1);
        },
        [](int64_t) {});
  }
}

#if defined(__AVX512BF16__)
// Adds the processor's own products of weights with the pair of inputs at x.
inline V add_pairs(V sum, V weights, const uint16_t* x) {
  return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights,
                             (__m512bh)_mm512_set1_epi32(load<int32_t>(x)));
}

// The weights of a panel of bfloat16: those of two inputs side by side in each lane.
class Interleave {
 public:
  Interleave() {
    alignas(64) uint16_t order[32];
    for (uint16_t i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
    order_ = load<__m512i>(order);
  }
  V operator()(V first, V second) const {
    const auto rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (V)_mm512_maskz_permutexvar_epi16(~0u, order_, rounded);
  }

 private:
  __m512i order_;
};

// Calls f(k, weights of both registers) for each pair of inputs k - 1 and k of a block, and g as
// `Blocks::each_input` does.
template <class Format, class F, class G>
inline void each_pair(Format& blocks, const Interleave& pairs, F&& f, G&& g) {
  V first[2];
  blocks.each_input(
      [&](int64_t k, V w0, V w1) {
        if (k % 2 == 0) {
          first[0] = w0;
          first[1] = w1;
        } else {
          f(k, pairs(first[0], w0), pairs(first[1], w1));
        }
      },
      g);
}

// The same as a panel of bfloat16, for the products of pairs.
template <WeightFormat kFormat>
void unpack_pairs(const char* from, int64_t inputs, void* out) {
  using Format = Blocks<kFormat>;
  const Interleave pairs;
  Format blocks(from);
  auto* to = static_cast<char*>(out);
  for (int64_t done = 0; done < inputs; done += Format::kBlock.inputs) {
    each_pair(
        blocks, pairs,
        [&](int64_t k, V p0, V p1) {
          store(to + (k - 1) * kRegister, p0);
          store(to + k * kRegister, p1);
        },
        [](int64_t) {});
    to += Format::kBlock.inputs * kRegister;
  }
}
#else
template <WeightFormat kFormat>
constexpr void (*unpack_pairs)(const char*, int64_t, void*) = nullptr;
#endif

// Sums of M rows with both registers of a panel, in the order of panels of floats.
template <int M>
struct RowSums {
  V sums[M][2] = {}, run[M][2] = {};

  void end_run() {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) {
        sums[m][r] += run[m][r];
        run[m][r] = V{};
      }
    }
  }
  void add_to(V (*totals)[2]) const {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      for (int r = 0; r < 2; ++r) totals[m][r] += sums[m][r];
    }
  }
};

// Adds to `totals` the products of M rows of floats with `inputs` inputs of one panel, at most a
// block. Few rows leave time to unpack weights between products.
template <WeightFormat kFormat, int M>
void multiply_blocks(const float* x, int64_t stride, const char* from, int64_t inputs,
                     V (*totals)[2]) {
  using Format = Blocks<kFormat>;
  Format blocks(from);
  RowSums<M> rows;
  for (const float* end = x + inputs; x < end; x += Format::kBlock.inputs) {
    blocks.prefetch();
    blocks.each_input(
        [&](int64_t k, V w0, V w1) {
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
            const V input = every_lane(x[m * stride + k]);
            rows.run[m][0] = multiply_add(w0, input, rows.run[m][0]);
            rows.run[m][1] = multiply_add(w1, input, rows.run[m][1]);
          }
        },
        [&](int64_t) { rows.end_run(); });
  }
  rows.add_to(totals);
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
// The same for rows of bfloat16.
template <WeightFormat kFormat, int M>
void multiply_pairs(const uint16_t* x, int64_t stride, const char* from, int64_t inputs,
                    V (*totals)[2]) {
  using Format = Blocks<kFormat>;
  const Interleave pairs;
  Format blocks(from);
  RowSums<M> rows;
  for (const uint16_t* end = x + inputs; x < end; x += Format::kBlock.inputs) {
    blocks.prefetch();
    each_pair(
        blocks, pairs,
        [&](int64_t k, V p0, V p1) {
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
            rows.run[m][0] = add_pairs(rows.run[m][0], p0, x + m * stride + k - 1);
            rows.run[m][1] = add_pairs(rows.run[m][1], p1, x + m * stride + k - 1);
          }
        },
        [&](int64_t) { rows.end_run(); });
  }
  rows.add_to(totals);
}
#else
template <WeightFormat kFormat, int M>
constexpr void (*multiply_pairs)(const uint16_t*, int64_t, const char*, int64_t,
                                 V (*)[2]) = nullptr;
#endif

// More rows take less time on weights that are unpacked once.
constexpr int64_t kFewRows = kLanes == 16 ? 8 : 2, kFewRowsOfPairs = 2;

struct BlockKernels {
  UnpackBlocks unpack;
  void (*unpack_pairs)(const char* from, int64_t inputs, void* out);
  // By the number of rows.
  void (*multiply[kFewRows])(const float* x, int64_t stride, const char* from, int64_t inputs,
                             V (*totals)[2]);
  void (*multiply_pairs[kFewRowsOfPairs])(const uint16_t* x, int64_t stride, const char* from,
                                          int64_t inputs, V (*totals)[2]);
};

template <WeightFormat kFormat, int... kRows, int... kRowsOfPairs>
constexpr BlockKernels block_kernels(std::integer_sequence<int, kRows...>,
                                     std::integer_sequence<int, kRowsOfPairs...>) {
  return {unpack_blocks<kFormat>,
          unpack_pairs<kFormat>,
          {multiply_blocks<kFormat, kRows + 1>...},
          {multiply_pairs<kFormat, kRowsOfPairs + 1>...}};
}

template <WeightFormat kFormat>
constexpr BlockKernels block_kernels() {
  return block_kernels<kFormat>(std::make_integer_sequence<int, kFewRows>(),
                                std::make_integer_sequence<int, kFewRowsOfPairs>());
}

// In the order of WeightFormat; null for floats.
constexpr BlockKernels kBlockKernels[] = {{},
                                          block_kernels<WeightFormat::kQ4_0>(),
                                          block_kernels<WeightFormat::kQ4_1>(),
                                          block_kernels<WeightFormat::kQ5_0>(),
                                          block_kernels<WeightFormat::kQ5_1>(),
                                          block_kernels<WeightFormat::kQ8_0>(),
                                          block_kernels<WeightFormat::kQ4_K>(),
                                          block_kernels<WeightFormat::kQ5_K>(),
                                          block_kernels<WeightFormat::kQ6_K>()};

}  // namespace
}  // namespace specdec::cpu
