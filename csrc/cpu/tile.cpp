// Compiled once per instruction set (SPECDEC_ISA). Vectors are the compiler's own, sixteen floats
// wide everywhere, so that each build adds in the same order. Nothing here may be an inline
// function of a shared header: the linker would keep one build of it for all processors.
#include "cpu/tile.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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
typedef uint64_t L __attribute__((vector_size(kWidth * 4)));  // half as many lanes
typedef uint16_t H __attribute__((vector_size(kWidth * 2)));

constexpr float kInf = __builtin_inff();
constexpr float kLargest = __FLT_MAX__;
constexpr float kLog2e = 1.44269504088896341f;

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
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  Half a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const Half b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  a = a > b ? a : b;
  Quarter c = __builtin_shufflevector(a, a, 0, 1, 2, 3);
  const Quarter d = __builtin_shufflevector(a, a, 4, 5, 6, 7);
  c = c > d ? c : d;
  const float low = c[0] > c[1] ? c[0] : c[1], high = c[2] > c[3] ? c[2] : c[3];
  return low > high ? low : high;
}

// One bit a lane.
inline uint32_t bits(I mask) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask));
#elif defined(__AVX2__)
  __m256 half[2];
  __builtin_memcpy(half, &mask, sizeof mask);
  return static_cast<uint32_t>(_mm256_movemask_ps(half[0]) | _mm256_movemask_ps(half[1]) << 8);
#else
  uint32_t all = 0;
  for (int i = 0; i < kWidth; ++i) all |= static_cast<uint32_t>(mask[i] & 1) << i;
  return all;
#endif
}

inline bool any(I mask) { return bits(mask) != 0; }

// Of the low 32 bits of each lane.
inline L multiply(L a, uint32_t b) {
#if defined(__AVX512F__)
  // The unmasked form trips -Wmaybe-uninitialized in GCC 12.
  const L wide = L{} + b;
  return reinterpret_cast<L>(_mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a),
                                                    reinterpret_cast<__m512i>(wide)));
#elif defined(__AVX2__)
  __m256i half[2];
  __builtin_memcpy(half, &a, sizeof a);
  for (__m256i& h : half) h = _mm256_mul_epu32(h, _mm256_set1_epi64x(static_cast<int64_t>(b)));
  __builtin_memcpy(&a, half, sizeof a);
  return a;
#else
  return (a & 0xffffffffu) * b;
#endif
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

// The weight of a logit, 2 units in the last place beside its product by inv_t: a power of two and
// a degree-5 minimax polynomial of the rest, 1 at 0.
struct Weight {
  explicit Weight(const Shape& s) : offset(s.offset), rate(s.inv_t * kLog2e), floor(weight_floor(s)) {
    if (rate > kLargest) rate = kLargest;
  }

  F operator()(F l) const {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const F d = l - offset;
    const F shifted = d * rate + kRound;
    const F n = shifted - kRound;
    const F r = d * rate - n;
    F p = fill(0x1.5bba14p-10f);
    p = p * r + 0x1.3cea88p-7f;
    p = p * r + 0x1.c6b752p-5f;
    p = p * r + 0x1.ebf9bcp-3f;
    p = p * r + 0x1.62e42ap-1f;
    p = p * r + 1.0f;
    const F w = as<F>(as<I>(p) + (as<I>(shifted) << 23));
    return l >= floor ? w : F{};
  }

  float offset, rate, floor;
};

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

template <bool kBlocks>
inline Peak peak_of(const float* tile, int64_t n, float* blocks) {
  F best = fill(-kInf);
  I magnitude{};  // of the bits: NaN lies above infinity
  const auto higher = [](F a, F b) { return a > b ? a : b; };
  const auto larger = [](F a, F b) {
    const I x = as<I>(a) & 0x7fffffff, y = as<I>(b) & 0x7fffffff;
    return x > y ? x : y;
  };
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    const F a = load(tile + i), b = load(tile + i + kWidth), c = load(tile + i + 2 * kWidth),
            d = load(tile + i + 3 * kWidth);
    const I x = larger(a, b), y = larger(c, d), z = x > y ? x : y;
    magnitude = z > magnitude ? z : magnitude;
    const F block = higher(higher(a, b), higher(c, d));
    best = higher(block, best);
    if (kBlocks) blocks[i / kBlock] = horizontal_max(block);
  }
  if (i < n) {
    F block = fill(-kInf);
    each(tile + i, n - i, -kInf, [&](int64_t, F l) {
      block = higher(l, block);
      const I x = larger(l, l);
      magnitude = x > magnitude ? x : magnitude;
    });
    best = higher(block, best);
    if (kBlocks) blocks[i / kBlock] = horizontal_max(block);
  }
  return {horizontal_max(best), any(magnitude > 0x7f800000)};
}

Peak peak(const float* tile, int64_t n, float* blocks) {
  return blocks != nullptr ? peak_of<true>(tile, n, blocks) : peak_of<false>(tile, n, blocks);
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
  const Weight weight(shape);
  return sum_of(tile, n, -kInf, [&](F l) { return weight(l); });
}

void weights(const float* tile, int64_t n, const Shape& shape, float* out) {
  const Weight weight(shape);
  map(tile, n, out, [&](F l) { return weight(l) * shape.scale; });
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
  int64_t begin = 0, last = -1;
  double running = prefix;
  for (; begin < n; begin += kBlock) {
    const float block = sum(weights + begin, n - begin < kBlock ? n - begin : kBlock);
    if (!(block > 0.0f)) continue;
    prefix = running;
    running += static_cast<double>(block);
    last = begin;
    if (running > target) break;
  }
  if (last < 0) return -1;
  begin = last;
  running = prefix;
  for (int64_t i = begin; i < n && i < begin + kBlock; ++i) {
    if (!(weights[i] > 0.0f)) continue;
    running += static_cast<double>(weights[i]);
    last = i;
    if (running > target) break;
  }
  return last;
}

int64_t count(const float* values, int64_t n, float floor) {
  I found{};
  each(values, n, -kInf, [&](int64_t, F v) { found -= v >= floor; });
  int64_t total = 0;
  for (int i = 0; i < kWidth; ++i) total += found[i];
  // Padding counts where everything does.
  return total < n ? total : n;
}

float mass(const float* values, const float* weights, int64_t n, float floor) {
  F a{};
  each(values, n, -kInf, [&](int64_t i, F v) {
    const F w = n - i < kWidth ? load_part(weights + i, n - i, 0.0f) : load(weights + i);
    a += v >= floor ? w : F{};
  });
  return horizontal_sum(a);
}

int64_t gather(const float* tile, int64_t n, int64_t first, float floor, float* values,
               int32_t* ids) {
  int64_t found = 0;
  each(tile, n, -kInf, [&](int64_t i, F l) {
    for (uint32_t left = bits(l >= floor); left != 0; left &= left - 1) {
      const int64_t at = i + __builtin_ctz(left);
      if (at >= n) return;
      values[found] = tile[at];
      ids[found++] = static_cast<int32_t>(first + at);
    }
  });
  return found;
}

struct Lanes {
  L word[4];  // in the low half of each
};

// Philox4x32-10; csrc/include/specdec/philox.h is the scalar form.
inline Lanes philox(const RaceNoise& noise, L lane, uint32_t stream) {
  L c0 = lane, c1 = L{} + noise.position, c2 = L{} + (noise.position >> 32), c3 = L{} + stream;
  uint32_t k0 = static_cast<uint32_t>(noise.seed), k1 = static_cast<uint32_t>(noise.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const L a = multiply(c0, 0xD2511F53u), b = multiply(c2, 0xCD9E8D57u);
    c0 = (b >> 32) ^ c1 ^ k0;
    c2 = (a >> 32) ^ c3 ^ k1;
    c1 = b;
    c3 = a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

constexpr int kLanes = kWidth / 2;
constexpr int kGroup = 4 * kLanes;  // tokens behind one call

// Words of kGroup consecutive tokens, the first a multiple of 4.
inline void noise_words(const RaceNoise& noise, int64_t first_token, uint32_t* out) {
  L lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = static_cast<uint64_t>(first_token / 4 + i);
  const Lanes x = philox(noise, lane, noise.stream);
  const L even = (x.word[0] & 0xffffffffu) | x.word[1] << 32;
  const L odd = (x.word[2] & 0xffffffffu) | x.word[3] << 32;
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t pair[2] = {even[i], odd[i]};
    __builtin_memcpy(out + 4 * i, pair, sizeof pair);
  }
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

// Race of up to sixteen tokens against the best so far.
struct Race {
  Race(const Shape& shape, const RaceNoise& noise, float floor)
      : shape(shape), noise(noise), rate(shape.inv_t * kUnit), best{floor, -1} {
    if (rate > kLargest) rate = kLargest;
  }

  // A score beats the best only if u < exp(l' - best), l' the scaled logit, as E >= u: most tokens
  // need no logarithm. The exponential is interpolated between powers of two, never below.
  bool hopeless(F l, U x) const {
    constexpr float kOne = 1065353216.0f;  // the bits of 1
    constexpr float kMargin = 1e-3f;       // all rounding below
    const float bias = kOne + (kMargin - best.score) * kUnit;
    F bound = (l - shape.offset) * rate + bias;
    bound = bound > 0.0f ? bound : F{};
    bound = bound < 2 * kOne ? bound : fill(2 * kOne);
    bound = l >= shape.threshold ? as<F>(__builtin_convertvector(bound, I)) : F{};
    const F u = __builtin_convertvector(as<I>(x >> 1), F) * 0x1p-31f;
    return !any(u < bound);
  }

  template <class Token>
  void run(F l, U x, int64_t at, Token&& token) {
    if (hopeless(l, x)) return;
    F g = gumbel(x);
    for (uint32_t left = bits(as<I>(x < 256u)); left != 0; left &= left - 1) {
      const int i = __builtin_ctz(left);
      const auto v = static_cast<uint64_t>(token(i));
      const Lanes tail = philox(noise, L{} + v / 4, noise.stream + 256u);
      const double u = (x[i] * 0x1p32 + static_cast<uint32_t>(tail.word[v % 4][0]) + 0.5) * 0x1p-64;
      // u < 2^-24: -log1p(-u) = u to the last bit of a float.
      g[i] = static_cast<float>(-__builtin_log(u));
    }
    const F score = l >= shape.threshold ? (l - shape.offset) * shape.inv_t + g : fill(-kInf);
    for (uint32_t left = bits(score > best.score); left != 0; left &= left - 1) {
      const int i = __builtin_ctz(left);
      if (score[i] > best.score) best = {score[i], at + i};
    }
  }

  static constexpr float kUnit = 8388608.0f * kLog2e;  // a factor e, in bits
  const Shape shape;
  const RaceNoise noise;
  float rate;
  Best best;
};

Best race(const float* tile, int64_t n, int64_t first_token, const Shape& shape,
          const RaceNoise& noise, float floor) {
  Race race(shape, noise, floor);
  for (int64_t begin = 0; begin < n; begin += kGroup) {
    uint32_t words[kGroup];
    noise_words(noise, first_token + begin, words);
    const int64_t end = begin + kGroup < n ? begin + kGroup : n;
    each(tile + begin, end - begin, -kInf, [&](int64_t i, F l) {
      U x;
      __builtin_memcpy(&x, words + i, sizeof x);
      race.run(l, x, begin + i, [&](int lane) { return first_token + begin + i + lane; });
    });
  }
  return race.best;
}

Best race_among(const float* values, const int32_t* ids, int64_t n, const Shape& shape,
                const RaceNoise& noise) {
  Race race(shape, noise, -kInf);
  each(values, n, -kInf, [&](int64_t i, F l) {
    uint32_t token[kWidth] = {};
    __builtin_memcpy(token, ids + i, static_cast<Size>(n - i < kWidth ? n - i : kWidth) * 4);
    U x;
    for (int half = 0; half < kWidth; half += kLanes) {
      L lane;
      for (int j = 0; j < kLanes; ++j) lane[j] = token[half + j] / 4;
      const Lanes words = philox(noise, lane, noise.stream);
      for (int j = 0; j < kLanes; ++j) {
        x[half + j] = static_cast<uint32_t>(words.word[token[half + j] % 4][j]);
      }
    }
    race.run(l, x, i, [&](int j) { return token[j]; });
  });
  return race.best;
}

void histogram(const float* tile, int64_t n, const Shape& shape, Histogram& h) {
  const Weight weight(shape);
  each(tile, n, -kInf, [&](int64_t i, F l) {
    const U raw = as<U>(l + 0.0f);  // -0 is 0: they tie
    const U negative = as<U>(as<I>(raw) >> 31);
    const U key = raw ^ (negative | 0x80000000u);
    if (!any((key >= h.low) & (key <= h.high))) return;
    const F w = weight(l);
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
                                                             count,
                                                             mass,
                                                             gather,
                                                             race,
                                                             race_among,
                                                             histogram};

}  // namespace specdec
