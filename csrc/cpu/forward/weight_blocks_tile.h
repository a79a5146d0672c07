#pragma once
// Floats of the blocks of a panel. Only linear_tile.cpp includes it, once per instruction set.
//
// A value is scale * q, or scale * q + minimum, q an integer of at most 8 bits. The product has at
// most 24 significant bits, so it is exact, and fusing it with the sum rounds as two operations do.
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
    for (int i = 0; i < 32; ++i) tables[i / 16][i % 16] = static_cast<float>(i - bias);
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

// Blocks of format F, of both registers of a panel.
template <WeightFormat kFormat>
void unpack_blocks(const char* from, int64_t inputs, float* out) {
  constexpr BlockFormat kBlock = block_format(kFormat);
  constexpr int kHigh = kBlock.bits > 4 && kBlock.bits < 8 ? static_cast<int>(kBlock.bits) - 4 : 0;
  constexpr int64_t kScales = kBlock.scales > 0 ? kBlock.scales : 1,
                    kShare = kBlock.inputs / kScales;
  const Lookup<4 + kHigh, kBlock.bias> lookup;
  for (const float* end = out + inputs * kWidth; out < end; out += kBlock.inputs * kWidth) {
    const char* const scales = from + (kBlock.has_minimum ? 4 : 2) * kWidth;
    const char* const minima = scales + kBlock.scales * kWidth;
    const char* const values = minima + (kBlock.has_minimum ? kBlock.scales : 0) * kWidth;
    const char* const high = values + kBlock.inputs / 2 * kWidth;
    for (int r = 0; r < 2; ++r) {
      const auto halves = [&](int64_t i) {
        return from_float16(reinterpret_cast<const uint16_t*>(from) + i * kWidth + r * kLanes);
      };
      const V all = halves(0), least = kBlock.has_minimum ? halves(1) : all;
      float* to = out + r * kLanes;
      for (int64_t share = 0; share < kScales; ++share) {
        V scale = all, minimum = least;  // those of parts with minima are below 64
        if constexpr (kBlock.scales > 0) {
          const int64_t at = share * kWidth + r * kLanes;
          scale = all * signed_bytes(scales + at);
          if constexpr (kBlock.has_minimum) minimum = -(least * signed_bytes(minima + at));
        }
        const auto put = [&](V q) {
          store(to, kBlock.has_minimum ? multiply_add(scale, q, minimum) : scale * q);
          to += kWidth;
        };
        if constexpr (kBlock.bits == 8) {
          for (int64_t k = 0; k < kShare; ++k) put(signed_bytes(values + k * kWidth + r * kLanes));
        } else {
          const auto word = [&](const char* words, int64_t i) {
            return load<U>(words + (i * kWidth + r * kLanes) * 4);
          };
          for (int64_t i = share * kShare / 8; i < (share + 1) * kShare / 8; ++i) {
            U low = word(values, i), above{};
            if constexpr (kHigh > 0) above = word(high, i * kHigh / 4) >> i * 8 * kHigh % 32;
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k, low >>= 4, above >>= kHigh) {
              if constexpr (kHigh == 0) put(lookup(low));
              if constexpr (kHigh > 0) put(lookup((low & 15u) | above << 4));
            }
          }
        }
      }
    }
    from += kBlock.bytes() * kWidth;
  }
}

// In the order of WeightFormat; null for floats.
constexpr UnpackBlocks kUnpackBlocks[] = {nullptr,
                                          unpack_blocks<WeightFormat::kQ4_0>,
                                          unpack_blocks<WeightFormat::kQ4_1>,
                                          unpack_blocks<WeightFormat::kQ5_0>,
                                          unpack_blocks<WeightFormat::kQ5_1>,
                                          unpack_blocks<WeightFormat::kQ8_0>,
                                          unpack_blocks<WeightFormat::kQ4_K>,
                                          unpack_blocks<WeightFormat::kQ5_K>,
                                          unpack_blocks<WeightFormat::kQ6_K>};

}  // namespace
}  // namespace specdec::cpu
