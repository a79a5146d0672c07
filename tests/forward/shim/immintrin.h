#pragma once
// The instructions that csrc/cpu/forward uses beyond those of this machine, one lane after the
// other, so that its source for AVX-512 and AMX runs anywhere. Compiled in place of the compiler's
// own header.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

typedef float __m512 __attribute__((vector_size(64)));
typedef int32_t __m512i __attribute__((vector_size(64)));
typedef int32_t __m512bh __attribute__((vector_size(64)));
typedef int16_t __m256i __attribute__((vector_size(32)));
typedef int8_t __m128i __attribute__((vector_size(16)));

inline __m512 _mm512_set1_ps(float x) { return __m512{} + x; }
inline __m512i _mm512_set1_epi32(int32_t x) { return __m512i{} + x; }

inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
}

inline __m512 _mm512_maskz_cvtph_ps(int, __m256i halves) {
  __m512 out;
  for (int i = 0; i < 16; ++i) {
    const int16_t bits = halves[i];
    _Float16 half;
    std::memcpy(&half, &bits, sizeof half);
    out[i] = static_cast<float>(half);
  }
  return out;
}

inline __m256i _mm512_maskz_cvtps_ph(int, __m512 x, int) {
  __m256i out;
  for (int i = 0; i < 16; ++i) {
    const _Float16 half = static_cast<_Float16>(x[i]);
    int16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    out[i] = bits;
  }
  return out;
}

// The two bfloat16 of a pair: `high` is the second in memory.
inline float half_of_pair(int32_t pair, bool high) {
  const uint32_t bits =
      high ? static_cast<uint32_t>(pair) & 0xffff0000u : static_cast<uint32_t>(pair) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return std::fpclassify(out) == FP_SUBNORMAL ? std::copysign(0.0f, out) : out;
}

inline float add_pair(float sum, int32_t a, int32_t b) {
  for (const bool high : {true, false}) {
    sum = std::fma(half_of_pair(a, high), half_of_pair(b, high), sum);
    if (std::fpclassify(sum) == FP_SUBNORMAL) sum = std::copysign(0.0f, sum);
  }
  return sum;
}

inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  for (int i = 0; i < 16; ++i) sum[i] = add_pair(sum[i], a[i], b[i]);
  return sum;
}

inline __m512 _mm512_maskz_permutexvar_ps(int, __m512i index, __m512 table) {
  __m512 out;
  for (int i = 0; i < 16; ++i) out[i] = table[index[i] & 15];
  return out;
}

inline __m512 _mm512_permutex2var_ps(__m512 low, __m512i index, __m512 high) {
  __m512 out;
  for (int i = 0; i < 16; ++i) {
    const int at = index[i] & 15;
    out[i] = index[i] & 16 ? high[at] : low[at];
  }
  return out;
}

inline __m512i _mm512_maskz_permutexvar_epi16(uint32_t, __m512i index, __m512i table) {
  uint16_t from[32], at[32], to[32];
  std::memcpy(from, &table, 64);
  std::memcpy(at, &index, 64);
  for (int i = 0; i < 32; ++i) to[i] = from[at[i] & 31];
  __m512i out;
  std::memcpy(&out, to, 64);
  return out;
}

inline __m512i _mm512_maskz_cvtepi8_epi32(int, __m128i bytes) {
  __m512i out;
  for (int i = 0; i < 16; ++i) out[i] = bytes[i];
  return out;
}

// Rounds to the nearest, ties to even; `low` becomes the first 16.
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  uint16_t to[32];
  for (int i = 0; i < 32; ++i) {
    const float x = (i < 16 ? low : high)[i & 15];
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to[i] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  __m512bh out;
  std::memcpy(&out, to, 64);
  return out;
}

struct Tiles {
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config;
  int32_t words[8][16][16];
};
inline thread_local Tiles tiles;

inline void _tile_loadconfig(const void* config) {
  std::memcpy(&tiles.config, config, sizeof tiles.config);
  std::memset(tiles.words, 0, sizeof tiles.words);
}
inline void _tile_release() { std::memset(&tiles, 0, sizeof tiles); }
inline void _tile_zero(int t) { std::memset(tiles.words[t], 0, sizeof tiles.words[t]); }

inline void _tile_loadd(int t, const void* from, int stride) {
  for (int row = 0; row < tiles.config.rows[t]; ++row) {
    std::memcpy(tiles.words[t][row], static_cast<const char*>(from) + row * stride,
                tiles.config.row_bytes[t]);
  }
}

inline void _tile_stored(int t, void* to, int stride) {
  for (int row = 0; row < tiles.config.rows[t]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tiles.words[t][row],
                tiles.config.row_bytes[t]);
  }
}

inline void _tile_dpbf16ps(int sums, int a, int b) {
  for (int row = 0; row < tiles.config.rows[sums]; ++row) {
    for (int k = 0; k < tiles.config.row_bytes[a] / 4; ++k) {
      for (int n = 0; n < tiles.config.row_bytes[sums] / 4; ++n) {
        float sum;
        std::memcpy(&sum, &tiles.words[sums][row][n], sizeof sum);
        sum = add_pair(sum, tiles.words[a][row][k], tiles.words[b][k][n]);
        std::memcpy(&tiles.words[sums][row][n], &sum, sizeof sum);
      }
    }
  }
}
