// Compiled once per instruction set (SPECDEC_ISA). Nothing here may be an inline function of a
// shared header: the linker would keep one build of it for all processors.
#include "cpu/row/tile.h"

#include "cpu/row/sixteen_floats.h"

#define SPECDEC_CAT_(a, b) a##b
#define SPECDEC_CAT(a, b) SPECDEC_CAT_(a, b)
#define SPECDEC_STR_(a) #a
#define SPECDEC_STR(a) SPECDEC_STR_(a)

namespace specdec::cpu {
namespace {

constexpr float kTopExponent = 126.0f;  // of 2: a larger one would overflow into the sign bit

// The weight of a logit: a power of two times a minimax polynomial of degree 5 of the remainder,
// which is 1 at 0. The error is 2 units in the last place, besides that of the product with inv_t.
struct Weight {
  explicit Weight(const WeightParams& s)
      : offset(s.offset), rate(s.inv_t * kLog2e), floor(weight_floor(s)) {
    if (rate > kLargest) rate = kLargest;
    top = kTopExponent / rate;
  }

  F operator()(const F& l) const {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    // No logit is far above the offset, unless a caller gives the statistics of another row.
    const F above = l - offset;
    const F d = select(above < top, above, F(top));
    const F shifted = d * rate + kRound;
    const F n = shifted - kRound;
    const F r = d * rate - n;
    F p = 0x1.5bba14p-10f;
    p = p * r + 0x1.3cea88p-7f;
    p = p * r + 0x1.c6b752p-5f;
    p = p * r + 0x1.ebf9bcp-3f;
    p = p * r + 0x1.62e42ap-1f;
    p = p * r + 1.0f;
    // Unsigned, because the shift drops the high bits of the rounding constant.
    const F w = as<F>(as<U>(p) + (as<U>(shifted) << 23));
    return select(l >= floor, w, F(0.0f));
  }

  float offset, rate, floor, top;
};

template <class Convert>
inline void widen(const uint16_t* in, int64_t n, float* out, Convert&& one) {
  typedef uint16_t Halves __attribute__((vector_size(kRegister / 2)));
  const auto load_halves = [](const uint16_t* p) {
    U wide;
    for (int i = 0; i < kParts; ++i) {
      Halves h;
      __builtin_memcpy(&h, p + i * kPartWidth, sizeof h);
      wide.part[i] = __builtin_convertvector(h, U::Part);
    }
    return wide;
  };
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, one(load_halves(in + i)));
  if (i < n) {
    uint16_t last[kWidth] = {};
    __builtin_memcpy(last, in + i, static_cast<Size>(n - i) * 2);
    store_part(out + i, n - i, one(load_halves(last)));
  }
}

void from_bfloat16(const uint16_t* in, int64_t n, float* out) {
  widen(in, n, out, [](const U& h) { return as<F>(h << 16); });
}

void from_float16(const uint16_t* in, int64_t n, float* out) {
  widen(in, n, out, [](const U& h) {
    // The multiplication corrects the bias of the exponent, also for subnormals.
    const F magnitude = as<F>((h & 0x7fffu) << 13) * 0x1p112f;
    const U special = as<U>((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return as<F>(as<U>(magnitude) | special | ((h & 0x8000u) << 16));
  });
}

void log_tile(const float* in, int64_t n, float* out) {
  map(in, n, out, [](const F& x) { return log(x); });
}

void keep_allowed(const float* in, int64_t n, const uint32_t* words, float rest, float* out) {
  constexpr uint32_t kBits[kWidth] = {1u << 0,  1u << 1,  1u << 2,  1u << 3, 1u << 4,  1u << 5,
                                      1u << 6,  1u << 7,  1u << 8,  1u << 9, 1u << 10, 1u << 11,
                                      1u << 12, 1u << 13, 1u << 14, 1u << 15};
  const U lane = load(kBits);
  each(in, n, 0.0f, [&](int64_t i, const F& v) {
    const I kept = (U(words[i / 32] >> (i % 32)) & lane) != 0u;
    const F chosen = select(kept, v, F(rest));
    n - i < kWidth ? store_part(out + i, n - i, chosen) : store(out + i, chosen);
  });
}

template <bool kStrips>
inline Peak peak_of(const float* tile, int64_t n, float* strip_maxima) {
  F best = -kInf;
  I magnitude = 0;  // largest bits without sign: those of a NaN are above those of infinity
  const auto bits_of = [](const F& a) { return as<I>(a) & 0x7fffffff; };
  int64_t i = 0;
  for (; i + kStrip <= n; i += kStrip) {
    const F a = load(tile + i), b = load(tile + i + kWidth), c = load(tile + i + 2 * kWidth),
            d = load(tile + i + 3 * kWidth);
    const I x = larger(bits_of(a), bits_of(b)), y = larger(bits_of(c), bits_of(d));
    magnitude = larger(larger(x, y), magnitude);
    const F block = larger(larger(a, b), larger(c, d));
    best = larger(block, best);
    if (kStrips) strip_maxima[i / kStrip] = horizontal_max(block);
  }
  if (i < n) {
    F block = -kInf;
    each(tile + i, n - i, -kInf, [&](int64_t, const F& l) {
      block = larger(l, block);
      magnitude = larger(bits_of(l), magnitude);
    });
    best = larger(block, best);
    if (kStrips) strip_maxima[i / kStrip] = horizontal_max(block);
  }
  return {horizontal_max(best), any(magnitude > 0x7f800000)};
}

Peak peak(const float* tile, int64_t n, float* strip_maxima) {
  return strip_maxima != nullptr ? peak_of<true>(tile, n, strip_maxima)
                                 : peak_of<false>(tile, n, strip_maxima);
}

template <class Value>
inline float sum_of(const float* tile, int64_t n, float rest, Value&& value) {
  F a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    a = a + value(load(tile + i));
    b = b + value(load(tile + i + kWidth));
    c = c + value(load(tile + i + 2 * kWidth));
    d = d + value(load(tile + i + 3 * kWidth));
  }
  each(tile + i, n - i, rest, [&](int64_t, const F& l) { a = a + value(l); });
  return horizontal_sum((a + b) + (c + d));
}

float sum_exp(const float* tile, int64_t n, const WeightParams& weight_params) {
  const Weight weight(weight_params);
  return sum_of(tile, n, -kInf, [&](const F& l) { return weight(l); });
}

void weights(const float* tile, int64_t n, const WeightParams& weight_params, float* out) {
  const Weight weight(weight_params);
  const float scale = weight_params.scale;
  map(tile, n, out, [&](const F& l) { return weight(l) * scale; });
}

void subtract(float* p, const float* q, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = p[i] > q[i] ? p[i] - q[i] : 0.0f;
}

float sum(const float* tile, int64_t n) {
  return sum_of(tile, n, 0.0f, [](const F& w) { return w; });
}

bool is_distribution(const float* tile, int64_t n) {
  I good = -1;
  each(tile, n, 0.0f, [&](int64_t, const F& p) { good = good & (p >= 0.0f) & (p < kInf); });
  return !any(good == 0);
}

int64_t pick(const float* weights, int64_t n, double prefix, double target) {
  int64_t begin = 0, last = -1;
  double running = prefix;
  for (; begin < n; begin += kStrip) {
    const float block = sum(weights + begin, n - begin < kStrip ? n - begin : kStrip);
    if (!(block > 0.0f)) continue;
    prefix = running;
    running += static_cast<double>(block);
    last = begin;
    if (running > target) break;
  }
  if (last < 0) return -1;
  begin = last;
  running = prefix;
  for (int64_t i = begin; i < n && i < begin + kStrip; ++i) {
    if (!(weights[i] > 0.0f)) continue;
    running += static_cast<double>(weights[i]);
    last = i;
    if (running > target) break;
  }
  return last;
}

int64_t count(const float* values, int64_t n, float floor) {
  I found = 0;
  each(values, n, -kInf, [&](int64_t, const F& v) { found = found - (v >= floor); });
  int32_t lanes[kWidth];
  store(lanes, found);
  int64_t total = 0;
  for (int32_t lane : lanes) total += lane;
  return total < n ? total : n;  // a floor of -inf counts the padding too
}

float mass(const float* values, const float* weights, int64_t n, float floor) {
  F a = 0.0f;
  each(values, n, -kInf, [&](int64_t i, const F& v) {
    const F w = n - i < kWidth ? load_part(weights + i, n - i, 0.0f) : load(weights + i);
    a = a + select(v >= floor, w, F(0.0f));
  });
  return horizontal_sum(a);
}

Overlap overlap(const float* p, const float* q, int64_t n, float t) {
  F sum = 0.0f, slope = 0.0f;
  each(p, n, 0.0f, [&](int64_t i, const F& at) {
    const F other = n - i < kWidth ? load_part(q + i, n - i, 0.0f) : load(q + i);
    const F scaled = at * t;
    const I below = scaled < other;
    sum = sum + select(below, scaled, other);
    slope = slope + select(below, at, F(0.0f));
  });
  return {horizontal_sum(sum), horizontal_sum(slope)};
}

int64_t gather(const float* tile, int64_t n, int64_t first, float floor, float* values,
               int32_t* ids) {
  int64_t found = 0;
  each(tile, n, -kInf, [&](int64_t i, const F& l) {
    uint32_t set = bits(l >= floor);
    if (n - i < kWidth) set &= (1u << (n - i)) - 1;
    if (set == 0) return;
    found += compress(set, l, static_cast<int32_t>(first + i), values + found, ids + found);
  });
  return found;
}

void histogram(const float* tile, int64_t n, const WeightParams& weight_params, Histogram& h) {
  const Weight weight(weight_params);
  each(tile, n, -kInf, [&](int64_t i, const F& l) {
    const U raw = as<U>(l + 0.0f);  // -0 is 0: they tie
    const U negative = as<U>(as<I>(raw) >> 31);
    const U key = raw ^ (negative | 0x80000000u);
    uint32_t set = bits((key >= h.low) & (key <= h.high));
    if (set == 0) return;
    uint32_t keys[kWidth];
    float w[kWidth];
    store(keys, key);
    store(w, weight(l));
    for (; set != 0; set &= set - 1) {
      const int j = __builtin_ctz(set);
      if (i + j >= n) return;
      const uint32_t bin = (keys[j] >> h.shift) & h.mask;
      h.counts[bin] += 1;
      h.masses[bin] += static_cast<double>(w[j]);
    }
  });
}

}  // namespace

Best SPECDEC_CAT(gumbel_, SPECDEC_ISA)(const float* tile, int64_t n, int64_t first_token,
                                       const WeightParams& weight_params, const GumbelNoise& noise,
                                       float floor);
Best SPECDEC_CAT(gumbel_among_, SPECDEC_ISA)(const float* values, const int32_t* ids, int64_t n,
                                             const WeightParams& weight_params,
                                             const GumbelNoise& noise);

extern const TileKernels SPECDEC_CAT(tile_kernels_, SPECDEC_ISA);
const TileKernels SPECDEC_CAT(tile_kernels_, SPECDEC_ISA) = {
    SPECDEC_STR(SPECDEC_ISA),
    from_bfloat16,
    from_float16,
    log_tile,
    keep_allowed,
    peak,
    sum_exp,
    weights,
    subtract,
    sum,
    is_distribution,
    pick,
    count,
    mass,
    gather,
    SPECDEC_CAT(gumbel_, SPECDEC_ISA),
    SPECDEC_CAT(gumbel_among_, SPECDEC_ISA),
    overlap,
    histogram};

}  // namespace specdec::cpu
