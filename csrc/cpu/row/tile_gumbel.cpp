// Gumbel-max sampling over a tile. Compiled once per instruction set, as tile.cpp is.
#include "cpu/row/sixteen_floats.h"
#include "cpu/row/tile.h"

#define SPECDEC_CAT_(a, b) a##b
#define SPECDEC_CAT(a, b) SPECDEC_CAT_(a, b)

namespace specdec::cpu {
namespace {

struct PhiloxWords {
  L word[4];  // in the low half of each lane
};

// Philox4x32-10 of several counters; specdec/philox.h is the scalar form.
inline PhiloxWords philox(const GumbelNoise& noise, const L& counter, uint32_t stream) {
  L c0 = counter, c1 = noise.position, c2 = noise.position >> 32, c3 = uint64_t{stream};
  uint32_t k0 = static_cast<uint32_t>(noise.seed), k1 = static_cast<uint32_t>(noise.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const L a = multiply(c0, 0xD2511F53u), b = multiply(c2, 0xCD9E8D57u);
    c0 = (b >> 32) ^ c1 ^ uint64_t{k0};
    c2 = (a >> 32) ^ c3 ^ uint64_t{k1};
    c1 = b;
    c3 = a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

constexpr int kLanes = kWidth / 2;
constexpr int kChunk = 4 * kWidth;  // tokens that are skipped together if none of them can win

constexpr uint64_t kCount[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7};

// The words of kChunk consecutive tokens, the first of which is a multiple of 4.
inline void noise_words(const GumbelNoise& noise, int64_t first_token, uint32_t* out) {
  for (int begin = 0; begin < kChunk; begin += 4 * kLanes) {
    const L counter = load(kCount) + static_cast<uint64_t>((first_token + begin) / 4);
    const PhiloxWords x = philox(noise, counter, noise.stream);
    uint64_t even[kLanes], odd[kLanes], pairs[2 * kLanes];
    store(even, (x.word[0] & 0xffffffffu) | x.word[1] << 32);
    store(odd, (x.word[2] & 0xffffffffu) | x.word[3] << 32);
    for (int i = 0; i < kLanes; ++i) {
      pairs[2 * i] = even[i];
      pairs[2 * i + 1] = odd[i];
    }
    __builtin_memcpy(out + begin, pairs, sizeof pairs);
  }
}

// Gumbel noise -log(E), where E = -log1p(-u) and u = (x + 1/2) / 2^32. Each half of the range keeps
// its relative precision, the upper one by way of the complement of x.
inline F gumbel(const U& x) {
  const I upper = as<I>(x) < 0;
  // A signed conversion will do: the top bit is clear in both cases.
  const I low_bits = as<I>(select(upper, x ^ 0xffffffffu, x));
  const F h = (convert<F>(low_bits) + 0.5f) * 0x1p-32f;
  const F y = select(upper, h, 1.0f - h);
  const F d = 1.0f - y;
  const F e = 0.0f - log(y);
  // Kahan: log1p(-u) = log(y) * u / (1 - y) makes up for the rounding of y = 1 - u.
  const I none = d == 0.0f;
  const F small = select(none, h, e * h / select(none, F(1.0f), d));
  return 0.0f - log(select(upper, e, small));
}

// The best score so far, and up to sixteen tokens at a time that may beat it.
struct GumbelSearch {
  GumbelSearch(const WeightParams& weight_params, const GumbelNoise& noise, float floor)
      : weight_params(weight_params),
        noise(noise),
        rate(weight_params.inv_t * kUnit),
        best{floor, -1} {
    if (rate > kLargest) rate = kLargest;
  }

  // Because E >= u, a score can beat the best only if u < exp(l' - best), where l' is the scaled
  // logit: most tokens need no logarithm. The exponential is interpolated between powers of two,
  // from above.
  I may_win(const F& l, const U& x) const {
    constexpr float kOne = 1065353216.0f;  // the bits of 1
    constexpr float kMargin = 1e-3f;       // covers all rounding below
    const float bias = kOne + (kMargin - best.score) * kUnit;
    F bound = larger((l - weight_params.offset) * rate + bias, F(0.0f));
    bound = select(bound < 2 * kOne, bound, F(2 * kOne));
    bound = select(l >= weight_params.threshold, as<F>(convert<I>(bound)), F(0.0f));
    const F u = convert<F>(as<I>(x >> 1)) * 0x1p-31f;
    return u < bound;
  }

  template <class Token>
  void run(const F& l, const U& x, int64_t at, Token&& token) {
    if (!any(may_win(l, x))) return;
    float g[kWidth], score[kWidth];
    store(g, gumbel(x));
    for (uint32_t set = bits(x < 256u); set != 0; set &= set - 1) {
      const int i = __builtin_ctz(set);
      g[i] = tail(x, i, static_cast<uint64_t>(token(i)));
    }
    const F sum = (l - weight_params.offset) * weight_params.inv_t + load(g);
    store(score, select(l >= weight_params.threshold, sum, F(-kInf)));
    for (int i = 0; i < kWidth; ++i) {
      if (score[i] > best.score) best = {score[i], at + i};
    }
  }

  // The noise of a small x, which takes 32 more bits.
  float tail(const U& x, int i, uint64_t token) const {
    uint32_t words[kWidth];
    uint64_t low[kLanes];
    store(words, x);
    store(low, philox(noise, token / 4, noise.stream + kTailStreams).word[token % 4]);
    const double u = (words[i] * 0x1p32 + static_cast<uint32_t>(low[0]) + 0.5) * 0x1p-64;
    // u < 2^-24: -log1p(-u) = u to the last bit of a float.
    return static_cast<float>(-__builtin_log(u));
  }

  static constexpr float kUnit = 8388608.0f * kLog2e;  // a factor of e, in units of a float's bits
  const WeightParams weight_params;
  const GumbelNoise noise;
  float rate;
  Best best;
};

}  // namespace

Best SPECDEC_CAT(gumbel_, SPECDEC_ISA)(const float* tile, int64_t n, int64_t first_token,
                                       const WeightParams& weight_params, const GumbelNoise& noise,
                                       float floor) {
  GumbelSearch search(weight_params, noise, floor);
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    uint32_t words[kChunk];
    noise_words(noise, first_token + begin, words);
    const int64_t size = n - begin < kChunk ? n - begin : kChunk;
    if (size == kChunk) {
      I hopeful = 0;
      for (int i = 0; i < kChunk; i += kWidth) {
        hopeful = hopeful | search.may_win(load(tile + begin + i), load(words + i));
      }
      if (!any(hopeful)) continue;
    }
    each(tile + begin, size, -kInf, [&](int64_t i, const F& l) {
      search.run(l, load(words + i), begin + i,
                 [&](int lane) { return first_token + begin + i + lane; });
    });
  }
  return search.best;
}

Best SPECDEC_CAT(gumbel_among_, SPECDEC_ISA)(const float* values, const int32_t* ids, int64_t n,
                                             const WeightParams& weight_params,
                                             const GumbelNoise& noise) {
  GumbelSearch search(weight_params, noise, -kInf);
  each(values, n, -kInf, [&](int64_t i, const F& l) {
    uint32_t token[kWidth] = {}, x[kWidth];
    __builtin_memcpy(token, ids + i, static_cast<Size>(n - i < kWidth ? n - i : kWidth) * 4);
    for (int half = 0; half < kWidth; half += kLanes) {
      uint64_t counter[kLanes], words[4][kLanes];
      for (int j = 0; j < kLanes; ++j) counter[j] = token[half + j] / 4;
      const PhiloxWords noise_of = philox(noise, load(counter), noise.stream);
      for (int w = 0; w < 4; ++w) store(words[w], noise_of.word[w]);
      for (int j = 0; j < kLanes; ++j) {
        x[half + j] = static_cast<uint32_t>(words[token[half + j] % 4][j]);
      }
    }
    search.run(l, load(x), i, [&](int j) { return token[j]; });
  });
  return search.best;
}

}  // namespace specdec::cpu
