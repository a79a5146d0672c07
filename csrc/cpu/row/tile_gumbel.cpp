// The gumbel_argmax of rule `match`. Compiled once per instruction set, as tile.cpp.
#include "cpu/row/tile.h"
#include "cpu/row/vector.h"

#define SPECDEC_CAT_(a, b) a##b
#define SPECDEC_CAT(a, b) SPECDEC_CAT_(a, b)

namespace specdec::cpu {
namespace {

struct Lanes {
  L word[4];  // in the low half of each
};

// Philox4x32-10; csrc/include/specdec/philox.h is the scalar form.
inline Lanes philox(const GumbelNoise& noise, const L& lane, uint32_t stream) {
  L c0 = lane, c1 = noise.position, c2 = noise.position >> 32, c3 = uint64_t{stream};
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
constexpr int kGroup = 4 * kWidth;  // tokens that one branch decides on

constexpr uint64_t kCount[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7};

// Words of kGroup consecutive tokens, the first a multiple of 4.
inline void noise_words(const GumbelNoise& noise, int64_t first_token, uint32_t* out) {
  for (int group = 0; group < kGroup; group += 4 * kLanes) {
    const L lane = load(kCount) + static_cast<uint64_t>((first_token + group) / 4);
    const Lanes x = philox(noise, lane, noise.stream);
    uint64_t even[kLanes], odd[kLanes], pairs[2 * kLanes];
    store(even, (x.word[0] & 0xffffffffu) | x.word[1] << 32);
    store(odd, (x.word[2] & 0xffffffffu) | x.word[3] << 32);
    for (int i = 0; i < kLanes; ++i) {
      pairs[2 * i] = even[i];
      pairs[2 * i + 1] = odd[i];
    }
    __builtin_memcpy(out + group, pairs, sizeof pairs);
  }
}

// -log(E), E = -log1p(-u), u = (x + 1/2) / 2^32: each half of the range keeps its relative
// precision, the upper one through the complement of x.
inline F gumbel(const U& x) {
  const I upper = as<I>(x) < 0;
  // Signed conversion: the top bit is clear on both sides.
  const I low_bits = as<I>(select(upper, x ^ 0xffffffffu, x));
  const F h = (convert<F>(low_bits) + 0.5f) * 0x1p-32f;
  const F y = select(upper, h, 1.0f - h);
  const F d = 1.0f - y;
  const F e = 0.0f - log(y);
  // Kahan: log1p(-u) = log(y) * u / (1 - y), right where y = 1 - u was rounded.
  const I none = d == 0.0f;
  const F small = select(none, h, e * h / select(none, F(1.0f), d));
  return 0.0f - log(select(upper, e, small));
}

// Race of up to sixteen tokens against the best so far.
struct Race {
  Race(const WeightParams& weight_params, const GumbelNoise& noise, float floor)
      : weight_params(weight_params),
        noise(noise),
        rate(weight_params.inv_t * kUnit),
        best{floor, -1} {
    if (rate > kLargest) rate = kLargest;
  }

  // A score beats the best only if u < exp(l' - best), l' the scaled logit, as E >= u: most tokens
  // need no logarithm. The exponential is interpolated between powers of two, never below.
  I hopes(const F& l, const U& x) const {
    constexpr float kOne = 1065353216.0f;  // the bits of 1
    constexpr float kMargin = 1e-3f;       // all rounding below
    const float bias = kOne + (kMargin - best.score) * kUnit;
    F bound = larger((l - weight_params.offset) * rate + bias, F(0.0f));
    bound = select(bound < 2 * kOne, bound, F(2 * kOne));
    bound = select(l >= weight_params.threshold, as<F>(convert<I>(bound)), F(0.0f));
    const F u = convert<F>(as<I>(x >> 1)) * 0x1p-31f;
    return u < bound;
  }

  template <class Token>
  void run(const F& l, const U& x, int64_t at, Token&& token) {
    if (!any(hopes(l, x))) return;
    float g[kWidth], score[kWidth];
    store(g, gumbel(x));
    for (uint32_t left = bits(x < 256u); left != 0; left &= left - 1) {
      const int i = __builtin_ctz(left);
      g[i] = rare(x, i, static_cast<uint64_t>(token(i)));
    }
    const F sum = (l - weight_params.offset) * weight_params.inv_t + load(g);
    store(score, select(l >= weight_params.threshold, sum, F(-kInf)));
    for (int i = 0; i < kWidth; ++i) {
      if (score[i] > best.score) best = {score[i], at + i};
    }
  }

  // x < 256 takes 32 more bits.
  float rare(const U& x, int i, uint64_t token) const {
    uint32_t words[kWidth];
    uint64_t tail[kLanes];
    store(words, x);
    store(tail, philox(noise, token / 4, noise.stream + 256u).word[token % 4]);
    const double u = (words[i] * 0x1p32 + static_cast<uint32_t>(tail[0]) + 0.5) * 0x1p-64;
    // u < 2^-24: -log1p(-u) = u to the last bit of a float.
    return static_cast<float>(-__builtin_log(u));
  }

  static constexpr float kUnit = 8388608.0f * kLog2e;  // a factor e, in bits
  const WeightParams weight_params;
  const GumbelNoise noise;
  float rate;
  Best best;
};

}  // namespace

Best SPECDEC_CAT(race_, SPECDEC_ISA)(const float* tile, int64_t n, int64_t first_token,
                                     const WeightParams& weight_params, const GumbelNoise& noise,
                                     float floor) {
  Race gumbel_argmax(weight_params, noise, floor);
  for (int64_t begin = 0; begin < n; begin += kGroup) {
    uint32_t words[kGroup];
    noise_words(noise, first_token + begin, words);
    const int64_t group = n - begin < kGroup ? n - begin : kGroup;
    if (group == kGroup) {
      I hopes = 0;
      for (int i = 0; i < kGroup; i += kWidth) {
        hopes = hopes | gumbel_argmax.hopes(load(tile + begin + i), load(words + i));
      }
      if (!any(hopes)) continue;
    }
    each(tile + begin, group, -kInf, [&](int64_t i, const F& l) {
      gumbel_argmax.run(l, load(words + i), begin + i,
                        [&](int lane) { return first_token + begin + i + lane; });
    });
  }
  return gumbel_argmax.best;
}

Best SPECDEC_CAT(race_among_, SPECDEC_ISA)(const float* values, const int32_t* ids, int64_t n,
                                           const WeightParams& weight_params,
                                           const GumbelNoise& noise) {
  Race gumbel_argmax(weight_params, noise, -kInf);
  each(values, n, -kInf, [&](int64_t i, const F& l) {
    uint32_t token[kWidth] = {}, x[kWidth];
    __builtin_memcpy(token, ids + i, static_cast<Size>(n - i < kWidth ? n - i : kWidth) * 4);
    for (int half = 0; half < kWidth; half += kLanes) {
      uint64_t lane[kLanes], words[4][kLanes];
      for (int j = 0; j < kLanes; ++j) lane[j] = token[half + j] / 4;
      const Lanes noise_of = philox(noise, load(lane), noise.stream);
      for (int w = 0; w < 4; ++w) store(words[w], noise_of.word[w]);
      for (int j = 0; j < kLanes; ++j) {
        x[half + j] = static_cast<uint32_t>(words[token[half + j] % 4][j]);
      }
    }
    gumbel_argmax.run(l, load(x), i, [&](int j) { return token[j]; });
  });
  return gumbel_argmax.best;
}

}  // namespace specdec::cpu
