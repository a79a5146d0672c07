#pragma once
// Sixteen floats at a time on every instruction set, so that each build adds in the same order.
// Only files that are compiled once per instruction set include it, and all of it has internal
// linkage, else the linker would keep one build of it for all processors.
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace specdec::cpu {
namespace {

#if defined(__AVX512DQ__)
constexpr int kRegister = 64;  // bytes
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif
constexpr int kWidth = 16;
constexpr int kParts = 64 / kRegister;
constexpr int kPartWidth = kWidth / kParts;

constexpr float kInf = __builtin_inff();
constexpr float kLargest = __FLT_MAX__;
constexpr float kLog2e = 1.44269504088896341f;

using Size = decltype(sizeof 0);

// 64 bytes in as many registers as the processor needs for them. The compiler's own vectors of that
// width would be split into scalars at each comparison.
template <class T>
struct Vector {
  typedef T Part __attribute__((vector_size(kRegister)));
  Part part[kParts];

  Vector() = default;
  Vector(T x) {
    for (Part& p : part) p = Part{} + x;
  }

#define SPECDEC_OPERATOR(op)                                             \
  friend inline Vector operator op(Vector a, const Vector& b) {          \
    for (int i = 0; i < kParts; ++i) a.part[i] = a.part[i] op b.part[i]; \
    return a;                                                            \
  }
  SPECDEC_OPERATOR(+)
  SPECDEC_OPERATOR(-)
  SPECDEC_OPERATOR(*)
  SPECDEC_OPERATOR(/)
  SPECDEC_OPERATOR(&)
  SPECDEC_OPERATOR(|)
  SPECDEC_OPERATOR(^)
#undef SPECDEC_OPERATOR

  friend inline Vector operator<<(Vector a, int bits) {
    for (Part& p : a.part) p = p << bits;
    return a;
  }
  friend inline Vector operator>>(Vector a, int bits) {
    for (Part& p : a.part) p = p >> bits;
    return a;
  }
};

using F = Vector<float>;
using I = Vector<int32_t>;  // also masks, which set all bits of a lane
using U = Vector<uint32_t>;
using L = Vector<uint64_t>;  // half as many lanes

#define SPECDEC_COMPARISON(op)                                              \
  template <class T>                                                        \
  inline I operator op(const Vector<T>& a, const Vector<T>& b) {            \
    I mask;                                                                 \
    for (int i = 0; i < kParts; ++i) mask.part[i] = a.part[i] op b.part[i]; \
    return mask;                                                            \
  }                                                                         \
  template <class T, class S>                                               \
  inline I operator op(const Vector<T>& a, S b) {                           \
    return a op Vector<T>(static_cast<T>(b));                               \
  }
SPECDEC_COMPARISON(<)
SPECDEC_COMPARISON(>)
SPECDEC_COMPARISON(<=)
SPECDEC_COMPARISON(>=)
SPECDEC_COMPARISON(==)
SPECDEC_COMPARISON(!=)
#undef SPECDEC_COMPARISON

template <class T>
inline Vector<T> select(const I& mask, const Vector<T>& a, const Vector<T>& b) {
  Vector<T> out;
  for (int i = 0; i < kParts; ++i) out.part[i] = mask.part[i] ? a.part[i] : b.part[i];
  return out;
}

// The larger of two; b if a is NaN.
template <class T>
inline Vector<T> larger(const Vector<T>& a, const Vector<T>& b) {
  Vector<T> out;
  for (int i = 0; i < kParts; ++i) out.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return out;
}

// Reinterprets the bits.
template <class To, class T>
inline To as(const Vector<T>& from) {
  To to;
  for (int i = 0; i < kParts; ++i) to.part[i] = (typename To::Part)from.part[i];
  return to;
}

// Converts the values.
template <class To, class T>
inline To convert(const Vector<T>& from) {
  To to;
  for (int i = 0; i < kParts; ++i) {
    to.part[i] = __builtin_convertvector(from.part[i], typename To::Part);
  }
  return to;
}

template <class T>
inline Vector<T> load(const T* p) {
  Vector<T> v;
  for (int i = 0; i < kParts; ++i) {
    __builtin_memcpy(&v.part[i], reinterpret_cast<const char*>(p) + i * kRegister, kRegister);
  }
  return v;
}

template <class T>
inline void store(T* p, const Vector<T>& v) {
  for (int i = 0; i < kParts; ++i) {
    __builtin_memcpy(reinterpret_cast<char*>(p) + i * kRegister, &v.part[i], kRegister);
  }
}

// The last, partial vector of a tile.
inline F load_part(const float* p, int64_t n, float rest) {
  float lanes[kWidth];
  store(lanes, F(rest));
  __builtin_memcpy(lanes, p, static_cast<Size>(n) * 4);
  return load(lanes);
}

inline void store_part(float* p, int64_t n, const F& v) {
  float lanes[kWidth];
  store(lanes, v);
  __builtin_memcpy(p, lanes, static_cast<Size>(n) * 4);
}

template <class Body>
inline void each(const float* tile, int64_t n, float rest, Body&& body) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body(i, load(tile + i));
  if (i < n) body(i, load_part(tile + i, n - i, rest));
}

// `out` may be `in`.
template <class Op>
inline void map(const float* in, int64_t n, float* out, Op&& op) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, op(load(in + i)));
  if (i < n) store_part(out + i, n - i, op(load_part(in + i, n - i, 0.0f)));
}

inline float horizontal_sum(const F& v) {
  float lanes[kWidth];
  store(lanes, v);
  for (int step = kWidth / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

inline float horizontal_max(const F& v) {
  typedef float Quarter __attribute__((vector_size(16)));
#if defined(__AVX2__)
  typedef float Half __attribute__((vector_size(32)));
#if defined(__AVX512DQ__)
  const Half x = __builtin_shufflevector(v.part[0], v.part[0], 0, 1, 2, 3, 4, 5, 6, 7);
  const Half y = __builtin_shufflevector(v.part[0], v.part[0], 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const Half x = v.part[0], y = v.part[1];
#endif
  const Half a = x > y ? x : y;
  const Quarter low = __builtin_shufflevector(a, a, 0, 1, 2, 3);
  const Quarter high = __builtin_shufflevector(a, a, 4, 5, 6, 7);
#else
  const Quarter low = v.part[0] > v.part[1] ? v.part[0] : v.part[1];
  const Quarter high = v.part[2] > v.part[3] ? v.part[2] : v.part[3];
#endif
  const Quarter b = low > high ? low : high;
  const float c = b[0] > b[1] ? b[0] : b[1], d = b[2] > b[3] ? b[2] : b[3];
  return c > d ? c : d;
}

// One bit a lane.
inline uint32_t bits(const I& mask) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)mask.part[0]);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask.part[0]) |
                               _mm256_movemask_ps((__m256)mask.part[1]) << 8);
#else
  uint32_t all = 0;
  for (int i = 0; i < kWidth; ++i) {
    all |= static_cast<uint32_t>(mask.part[i / kPartWidth][i % kPartWidth] & 1) << i;
  }
  return all;
#endif
}

inline bool any(const I& mask) { return bits(mask) != 0; }

constexpr int32_t kIndices[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Writes the lanes whose bits are set, in order, and their indices; returns how many. It may write
// to all sixteen places.
inline int compress(uint32_t set, const F& v, int32_t first, float* values, int32_t* ids) {
#if defined(__AVX512DQ__)
  const auto mask = static_cast<__mmask16>(set);
  F pressed;
  pressed.part[0] = (F::Part)_mm512_maskz_compress_ps(mask, (__m512)v.part[0]);
  I index = load(kIndices) + first;
  index.part[0] = (I::Part)_mm512_maskz_compress_epi32(mask, (__m512i)index.part[0]);
  store(values, pressed);
  store(ids, index);
  return __builtin_popcount(set);
#else
  float lanes[kWidth];
  store(lanes, v);
  int found = 0;
  for (; set != 0; set &= set - 1) {
    const int i = __builtin_ctz(set);
    values[found] = lanes[i];
    ids[found++] = first + i;
  }
  return found;
#endif
}

// The product of the low 32 bits of each lane.
inline L multiply(const L& a, uint32_t b) {
  L out;
  const L wide(b);
  for (int i = 0; i < kParts; ++i) {
#if defined(__AVX512DQ__)
    // The unmasked form trips -Wmaybe-uninitialized in GCC 12.
    out.part[i] = (L::Part)_mm512_maskz_mul_epu32(0xff, (__m512i)a.part[i], (__m512i)wide.part[i]);
#elif defined(__AVX2__)
    out.part[i] = (L::Part)_mm256_mul_epu32((__m256i)a.part[i], (__m256i)wide.part[i]);
#else
    out.part[i] = (a.part[i] & 0xffffffffu) * wide.part[i];
#endif
  }
  return out;
}

// The error is 1 unit in the last place; log(0) = -inf, log(inf) = inf, NaN below 0.
inline F log(const F& x) {
  const I tiny = x < 1.17549435e-38f;
  const F scaled = select(tiny, x * 8388608.0f, x);
  U raw = as<U>(scaled);
  F e = convert<F>(as<I>(raw >> 23) - 126);
  e = select(tiny, e - 23.0f, e);
  raw = (raw & 0x007fffffu) | 0x3f000000u;
  F m = as<F>(raw);
  const I low = m < 0.707106781186547524f;
  e = select(low, e - 1.0f, e);
  m = select(low, m + m, m) - 1.0f;
  const F z = m * m;
  F p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * z;
  p = p + e * -2.12194440e-4f;
  p = p - 0.5f * z;
  F y = m + p;
  y = y + e * 0.693359375f;
  y = select(x == 0.0f, F(-kInf), y);
  y = select(x == kInf, F(kInf), y);
  return select((x < 0.0f) | (x != x), F(__builtin_nanf("")), y);
}

}  // namespace
}  // namespace specdec::cpu
