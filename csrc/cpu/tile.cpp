// Compiled once per instruction set (SPECDEC_ISA). Vectors are the compiler's own, sixteen floats
// wide everywhere, so that each build adds in the same order. Nothing here may be an inline
// function of a shared header: the linker would keep one build of it for all processors.
#include "cpu/tile.h"

#define SPECDEC_CAT_(a, b) a##b
#define SPECDEC_CAT(a, b) SPECDEC_CAT_(a, b)
#define SPECDEC_STR_(a) #a
#define SPECDEC_STR(a) SPECDEC_STR_(a)

namespace specdec {
namespace {

constexpr int kWidth = 16;
typedef float F __attribute__((vector_size(kWidth * 4)));
typedef int32_t I __attribute__((vector_size(kWidth * 4)));
typedef uint32_t U __attribute__((vector_size(kWidth * 4)));
typedef uint64_t L __attribute__((vector_size(kWidth * 8)));
typedef uint16_t H __attribute__((vector_size(kWidth * 2)));

constexpr float kInf = __builtin_inff();

using Size = decltype(sizeof 0);

template <class To, class From>
inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same bits");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

inline F fill(float x) { return F{} + x; }

inline F load(const float* p) {
  F v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }

// The last, partial vector of a tile.
inline F load_part(const float* p, int64_t n, float rest) {
  F v = fill(rest);
  __builtin_memcpy(&v, p, static_cast<Size>(n) * 4);
  return v;
}

inline void store_part(float* p, int64_t n, F v) {
  __builtin_memcpy(p, &v, static_cast<Size>(n) * 4);
}

template <class Body>
inline void each(const float* tile, int64_t n, float rest, Body&& body) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body(i, load(tile + i));
  if (i < n) body(i, load_part(tile + i, n - i, rest));
}

// In place allowed.
template <class Op>
inline void map(const float* in, int64_t n, float* out, Op&& op) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, op(load(in + i)));
  if (i < n) store_part(out + i, n - i, op(load_part(in + i, n - i, 0.0f)));
}

inline float horizontal_sum(F v) {
  for (int step = kWidth / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) v[i] += v[i + step];
  }
  return v[0];
}

inline float horizontal_max(F v) {
  float best = v[0];
  for (int i = 1; i < kWidth; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

inline bool any(I mask) {
  uint64_t words[kWidth / 2];
  __builtin_memcpy(words, &mask, sizeof mask);
  uint64_t all = 0;
  for (uint64_t w : words) all |= w;
  return all != 0;
}

// 1.5 units in the last place on [-87, 88]; 0 below; NaN stays NaN. Cody-Waite and a degree-6
// minimax polynomial.
inline F exp(F x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const F n = (x * 1.44269504088896341f + kRound) - kRound;
  F r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  F p = fill(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const I exponent = (__builtin_convertvector(n, I) + 127) << 23;
  return x < kSmallestExponent ? F{} : p * as<F>(exponent);
}

// 1 unit in the last place; log(0) = -inf, log(inf) = inf, NaN below 0.
inline F log(F x) {
  const I tiny = x < 1.17549435e-38f;
  const F scaled = tiny ? x * 8388608.0f : x;
  U bits = as<U>(scaled);
  F e = __builtin_convertvector(as<I>(bits >> 23) - 126, F);
  e = tiny ? e - 23.0f : e;
  bits = (bits & 0x007fffffu) | 0x3f000000u;
  F m = as<F>(bits);
  const I low = m < 0.707106781186547524f;
  e = low ? e - 1.0f : e;
  m = (low ? m + m : m) - 1.0f;
  const F z = m * m;
  F p = fill(7.0376836292e-2f);
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
  y = x == 0.0f ? fill(-kInf) : y;
  y = x == kInf ? fill(kInf) : y;
  return (x < 0.0f) | (x != x) ? fill(__builtin_nanf("")) : y;
}

inline F shaped(F l, const Shape& s) {
  const F w = exp((l - s.offset) * s.inv_t) * s.scale;
  return l >= s.threshold ? w : F{};
}

template <class Convert>
inline void convert(const uint16_t* in, int64_t n, float* out, Convert&& one) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    H h;
    __builtin_memcpy(&h, in + i, sizeof h);
    store(out + i, one(h));
  }
  if (i < n) {
    H h{};
    __builtin_memcpy(&h, in + i, static_cast<Size>(n - i) * 2);
    store_part(out + i, n - i, one(h));
  }
}

void from_bfloat16(const uint16_t* in, int64_t n, float* out) {
  convert(in, n, out, [](H h) { return as<F>(__builtin_convertvector(h, U) << 16); });
}

void from_float16(const uint16_t* in, int64_t n, float* out) {
  convert(in, n, out, [](H h) {
    const U wide = __builtin_convertvector(h, U);
    // The multiplication moves the exponent's bias and makes subnormals right.
    const F magnitude = as<F>((wide & 0x7fffu) << 13) * 0x1p112f;
    const U special = as<U>((wide & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return as<F>(as<U>(magnitude) | special | ((wide & 0x8000u) << 16));
  });
}

void log_tile(const float* in, int64_t n, float* out) {
  map(in, n, out, [](F x) { return log(x); });
}

Peak peak(const float* tile, int64_t n, float* blocks) {
  F best = fill(-kInf);
  I nan{};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    F block = fill(-kInf);
    each(tile + begin, n - begin < kBlock ? n - begin : kBlock, -kInf, [&](int64_t, F l) {
      block = l > block ? l : block;
      nan |= l != l;
    });
    if (blocks != nullptr) blocks[begin / kBlock] = horizontal_max(block);
    best = block > best ? block : best;
  }
  return {horizontal_max(best), any(nan)};
}

template <class Value>
inline float sum_of(const float* tile, int64_t n, float rest, Value&& value) {
  F a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    a += value(load(tile + i));
    b += value(load(tile + i + kWidth));
    c += value(load(tile + i + 2 * kWidth));
    d += value(load(tile + i + 3 * kWidth));
  }
  each(tile + i, n - i, rest, [&](int64_t, F l) { a += value(l); });
  return horizontal_sum((a + b) + (c + d));
}

float sum_exp(const float* tile, int64_t n, const Shape& shape) {
  const Shape s = shape;
  return sum_of(tile, n, -kInf, [&](F l) { return shaped(l, s); });
}

void weights(const float* tile, int64_t n, const Shape& shape, float* out) {
  const Shape s = shape;
  map(tile, n, out, [&](F l) { return shaped(l, s); });
}

void subtract(float* p, const float* q, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = p[i] > q[i] ? p[i] - q[i] : 0.0f;
}

float sum(const float* tile, int64_t n) {
  return sum_of(tile, n, 0.0f, [](F w) { return w; });
}

bool is_law(const float* tile, int64_t n) {
  I bad{};
  each(tile, n, 0.0f, [&](int64_t, F p) { bad |= ~((p >= 0.0f) & (p < kInf)); });
  return !any(bad);
}

int64_t pick(const float* weights, int64_t n, double prefix, double target) {
  double running = prefix;
  int64_t last = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (!(weights[i] > 0.0f)) continue;
    running += static_cast<double>(weights[i]);
    last = i;
    if (running > target) return i;
  }
  return last;
}

struct Lanes {
  U word[4];
};

// Philox4x32-10 on sixteen lanes at once; csrc/include/specdec/philox.h is the scalar form.
inline Lanes philox_lanes(const RaceNoise& noise, U lane, uint32_t stream) {
  U c0 = lane, c1 = U{} + static_cast<uint32_t>(noise.position),
    c2 = U{} + static_cast<uint32_t>(noise.position >> 32), c3 = U{} + stream;
  uint32_t k0 = static_cast<uint32_t>(noise.seed), k1 = static_cast<uint32_t>(noise.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const L a = __builtin_convertvector(c0, L) * uint64_t{0xD2511F53u};
    const L b = __builtin_convertvector(c2, L) * uint64_t{0xCD9E8D57u};
    c0 = __builtin_convertvector(b >> 32, U) ^ c1 ^ k0;
    c2 = __builtin_convertvector(a >> 32, U) ^ c3 ^ k1;
    c1 = __builtin_convertvector(b, U);
    c3 = __builtin_convertvector(a, U);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// -log(E), E = -log1p(-u), u = (x + 1/2) / 2^32: each half of the range keeps its relative
// precision, the upper one through the complement of x.
inline F gumbel(U x) {
  const I upper = as<I>(x) < 0;
  const U low_bits = upper ? ~x : x;
  // Signed conversion: the top bit is clear on both sides.
  const F h = (__builtin_convertvector(as<I>(low_bits), F) + 0.5f) * 0x1p-32f;
  const F y = upper ? h : 1.0f - h;
  const F d = 1.0f - y;
  const F e = F{} - log(y);
  // Kahan: log1p(-u) = log(y) * u / (1 - y), right where y = 1 - u was rounded.
  const F small = d == 0.0f ? h : e * h / (d == 0.0f ? fill(1.0f) : d);
  return F{} - log(upper ? e : small);
}

Best race(const float* tile, int64_t n, int64_t first_token, const Shape& shape,
          const RaceNoise& noise) {
  Best best{-kInf, -1};
  U lane_step;
  for (int i = 0; i < kWidth; ++i) lane_step[i] = static_cast<uint32_t>(i);
  for (int64_t begin = 0; begin < n; begin += 4 * kWidth) {
    const U lane = lane_step + static_cast<uint32_t>((first_token + begin) / 4);
    const Lanes lanes = philox_lanes(noise, lane, noise.stream);
    uint32_t words[4 * kWidth];
    for (int j = 0; j < 4; ++j) {
      for (int i = 0; i < kWidth; ++i) words[4 * i + j] = lanes.word[j][i];
    }
    for (int64_t k = 0; k < 4 && begin + k * kWidth < n; ++k) {
      const int64_t at = begin + k * kWidth;
      const F l = n - at >= kWidth ? load(tile + at) : load_part(tile + at, n - at, -kInf);
      U x;
      __builtin_memcpy(&x, words + k * kWidth, sizeof x);
      F g = gumbel(x);
      if (any(x < 256u)) {
        const Lanes tail = philox_lanes(noise, lane, noise.stream + 256u);
        for (int i = 0; i < kWidth; ++i) {
          if (x[i] >= 256u) continue;
          const int64_t token = k * kWidth + i;  // within this group of lanes
          const uint32_t more = tail.word[token % 4][token / 4];
          const double u = (x[i] * 0x1p32 + more + 0.5) * 0x1p-64;
          // u < 2^-24: -log1p(-u) = u to the last bit of a float.
          g[i] = static_cast<float>(-__builtin_log(u));
        }
      }
      const F score = l >= shape.threshold ? (l - shape.offset) * shape.inv_t + g : fill(-kInf);
      if (!any(score > best.score)) continue;
      for (int i = 0; i < kWidth; ++i) {
        if (score[i] > best.score) best = {score[i], at + i};
      }
    }
  }
  return best;
}

void histogram(const float* tile, int64_t n, const Shape& shape, Histogram& h) {
  const Shape s = shape;
  each(tile, n, -kInf, [&](int64_t i, F l) {
    const U bits = as<U>(l + 0.0f);  // -0 is 0: they tie
    const U negative = as<U>(as<I>(bits) >> 31);
    const U key = bits ^ (negative | 0x80000000u);
    if (!any((key >= h.low) & (key <= h.high))) return;
    const F w = shaped(l, s);
    for (int j = 0; j < kWidth && i + j < n; ++j) {
      if (key[j] < h.low || key[j] > h.high) continue;
      const uint32_t bin = (key[j] >> h.shift) & h.mask;
      h.counts[bin] += 1;
      h.masses[bin] += static_cast<double>(w[j]);
    }
  });
}

}  // namespace

extern const TileKernels SPECDEC_CAT(tile_kernels_, SPECDEC_ISA);
const TileKernels SPECDEC_CAT(tile_kernels_, SPECDEC_ISA) = {SPECDEC_STR(SPECDEC_ISA),
                                                             from_bfloat16,
                                                             from_float16,
                                                             log_tile,
                                                             peak,
                                                             sum_exp,
                                                             weights,
                                                             subtract,
                                                             sum,
                                                             is_law,
                                                             pick,
                                                             race,
                                                             histogram};

}  // namespace specdec
