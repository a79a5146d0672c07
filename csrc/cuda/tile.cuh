#pragma once
// One span: the 512 entries of a row that a warp takes at once, 16 a lane. A tile of the contract is
// eight of them. The map from entries to lanes depends on nothing but the dtype.
#include <cmath>

#include "cuda/team.cuh"
#include "specdec/philox.h"
#include "specdec/sampling.h"

namespace specdec {

constexpr int kSpan = 512;
constexpr int kPerLane = kSpan / kLanes;
constexpr int kQuads = kPerLane / 4;
static_assert(kTile % kSpan == 0, "spans divide tiles");

constexpr float kLargest = 3.402823466e38f;
constexpr float kLog2E = 1.44269504088896341f;

// What the elements of a row are, and what of them is wanted. A negative probability becomes NaN.
enum class Read : int32_t { kLogits, kProbs, kLogOfProbs };

struct RowView {
  const void* data;
  int64_t vocab;
  DType dtype;
  Read read;

  RowView() = default;
  __device__ RowView(const Rows& rows, int64_t sequence, int64_t row, int64_t vocab,
                     Read read = Read::kLogits)
      : vocab(vocab), dtype(rows.dtype), read(read) {
    data = address(rows.data, sequence * rows.stride_sequence + row * rows.stride_row);
  }

  // The same row without its first `skip` elements, and no longer than `size`.
  __device__ RowView part(int64_t skip, int64_t size) const {
    RowView out = *this;
    out.data = address(data, skip);
    out.vocab = vocab - skip < size ? vocab - skip : size;
    return out;
  }

  __device__ int64_t spans() const { return (vocab + kSpan - 1) / kSpan; }
  __device__ bool aligned() const { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
  __device__ bool wide() const { return dtype == DType::kFloat32; }

 private:
  __device__ const void* address(const void* from, int64_t elements) const {
    return static_cast<const char*>(from) + elements * (wide() ? 4 : 2);
  }
};

// The lane that holds entry `index` of a span, and the element it is there.
inline __device__ int holder(bool wide, int index) {
  return wide ? index % 128 / 4 : index % 256 / 8;
}
inline __device__ int element(bool wide, int index) {
  return wide ? index / 128 * 4 + index % 4 : index / 256 * 8 + index % 8;
}

// Elements of a lane as they lie in memory; the 16-bit dtypes fill half of it.
struct Packed {
  uint32_t word[kPerLane];
};

// Where element j of this lane stands in its span: four neighbours of float32, eight of the 16-bit
// dtypes.
inline __device__ int place(bool wide, int j) {
  return wide ? j / 4 * 128 + lane_id() * 4 + j % 4 : j / 8 * 256 + lane_id() * 8 + j % 8;
}
inline __device__ int first_of_quad(bool wide, int quad) { return place(wide, quad * 4); }

inline __device__ float from_bfloat16(uint32_t h) { return bits_as<float>(h << 16); }

// The multiplication moves the exponent's bias and makes subnormals right.
inline __device__ float from_float16(uint32_t h) {
  const float magnitude = bits_as<float>((h & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
  return bits_as<float>(bits_as<uint32_t>(magnitude) | special | (h & 0x8000u) << 16);
}

inline __device__ float as_wanted(Read read, float value) {
  if (read == Read::kLogOfProbs) return logf(value);
  return read == Read::kProbs && !(value >= 0) ? NAN : value;
}

inline __device__ float at(const RowView& row, int64_t index) {
  float value;
  if (row.dtype == DType::kFloat32) {
    value = static_cast<const float*>(row.data)[index];
  } else {
    const uint32_t h = static_cast<const uint16_t*>(row.data)[index];
    value = row.dtype == DType::kBFloat16 ? from_bfloat16(h) : from_float16(h);
  }
  return as_wanted(row.read, value);
}

// Sixteen bytes a load where the row allows it; else one element a load, to the same lanes. `fill`
// are the bits of what stands beyond the end.
template <class T>
inline __device__ void load_elements(const RowView& row, int64_t begin, uint32_t fill,
                                     Packed& out) {
  constexpr int kPerLoad = 16 / sizeof(T), kPerWord = 4 / sizeof(T);
  // Else the unused half is undefined, and would hold its registers from one span to the next.
#pragma unroll
  for (int w = kPerLane / kPerWord; w < kPerLane; ++w) out.word[w] = 0;
  const T* const data = static_cast<const T*>(row.data) + begin + lane_id() * kPerLoad;
  const int64_t left = row.vocab - begin - lane_id() * kPerLoad;
  if (row.aligned() && row.vocab - begin >= kSpan) {
#pragma unroll
    for (int load = 0; load < kPerLane / kPerLoad; ++load) {
      const uint4 v = *reinterpret_cast<const uint4*>(data + load * kLanes * kPerLoad);
      out.word[load * 4] = v.x;
      out.word[load * 4 + 1] = v.y;
      out.word[load * 4 + 2] = v.z;
      out.word[load * 4 + 3] = v.w;
    }
    return;
  }
#pragma unroll
  for (int w = 0; w < kPerLane / kPerWord; ++w) {
    const int first = w / 4 * kLanes * kPerLoad + w % 4 * kPerWord;
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      uint32_t bits = fill;
      if (first + j < left) {
        if constexpr (kPerWord == 1) {
          bits = bits_as<uint32_t>(data[first]);
        } else {
          bits = data[first + j];
        }
      }
      word |= bits << (j * 16);
    }
    out.word[w] = word;
  }
}

// Beyond the end stands what has no weight: -inf, or probability 0.
inline __device__ void load_span(const RowView& row, int64_t span, Packed& out) {
  const bool probabilities = row.read != Read::kLogits;
  const int64_t begin = span * kSpan;
  if (row.dtype == DType::kFloat32) {
    load_elements<float>(row, begin, probabilities ? 0 : 0xff800000u, out);
  } else {
    const uint32_t minus_inf = row.dtype == DType::kBFloat16 ? 0xff80u : 0xfc00u;
    load_elements<uint16_t>(row, begin, probabilities ? 0 : minus_inf, out);
  }
}

// The next quad to the front, the first one to the end: a loop that rotates its values needs the
// registers of one quad's work, not of four.
inline __device__ void rotate(float (&values)[kPerLane]) {
  const float first[4] = {values[0], values[1], values[2], values[3]};
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) values[j] = j + 4 < kPerLane ? values[j + 4] : first[j % 4];
}

inline __device__ void unpack(const RowView& row, const Packed& in, float (&out)[kPerLane]) {
  if (row.dtype == DType::kFloat32) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) out[j] = bits_as<float>(in.word[j]);
  } else if (row.dtype == DType::kBFloat16) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const uint32_t pair = in.word[j / 2];
      out[j] = bits_as<float>(j % 2 ? pair & 0xffff0000u : pair << 16);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      out[j] = from_float16(in.word[j / 2] >> (j % 2 * 16) & 0xffffu);
    }
  }
  if (row.read == Read::kLogOfProbs) {
#pragma unroll 1
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = logf(out[j]);
      rotate(out);
    }
  } else if (row.read == Read::kProbs) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) out[j] = out[j] >= 0 ? out[j] : NAN;
  }
}

inline __device__ void read_span(const RowView& row, int64_t span, float (&out)[kPerLane]) {
  Packed packed;
  load_span(row, span, packed);
  unpack(row, packed, out);
}

// f(span, values) for the spans of this warp; the loads of the next one are under way meanwhile.
template <class F>
inline __device__ void each_span(const Team& team, const RowView& row, int part, int parts, F f) {
  const int64_t spans = row.spans(), step = team.span_step(parts);
  int64_t span = team.first_span(part);
  if (span >= spans) return;
  Packed next;
  load_span(row, span, next);
  for (; span < spans; span += step) {
    float values[kPerLane];
    unpack(row, next, values);
    if (span + step < spans) load_span(row, span + step, next);
    f(span, values);
  }
}

// The larger; NaN if either is.
inline __device__ float max_or_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
#else
  if (a != a || b != b) return NAN;
  return a > b ? a : b;
#endif
}

inline __device__ uint32_t warp_max(uint32_t value) {
#ifdef __CUDA_ARCH__
  return __reduce_max_sync(kAllLanes, value);
#else
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, value, step);
    value = other > value ? other : value;
  }
  return value;
#endif
}

// Unsigned order of the keys is the order of the floats; the positive NaN is above all.
inline __device__ uint32_t ordered_key(float value) {
  const uint32_t bits = bits_as<uint32_t>(value + 0.0f);  // -0 is 0: they tie
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline __device__ float from_ordered_key(uint32_t key) {
  return bits_as<float>(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The largest of a span, NaN if one is; in every lane.
inline __device__ float span_max(const float (&values)[kPerLane]) {
  float best = values[0];
#pragma unroll
  for (int j = 1; j < kPerLane; ++j) best = max_or_nan(best, values[j]);
  return from_ordered_key(warp_max(ordered_key(best)));
}

// 2^x within two units in the last place; 0 where it would be subnormal.
inline __device__ float exp2_fast(float x) {
#ifdef __CUDA_ARCH__
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  const float out = exp2f(x);
  return out < 0x1p-126f ? 0.0f : out;
#endif
}

// exp((l - offset) / T) where l >= threshold, else 0.
struct Shape {
  float offset;
  float rate;  // log2(e) / T
  float threshold;

  __device__ float weight(float l) const {
    return l >= threshold ? exp2_fast((l - offset) * rate) : 0.0f;
  }
};

inline __device__ void weigh(float (&values)[kPerLane], const Shape& shape) {
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) values[j] = shape.weight(values[j]);
}

inline __device__ float rate_of(float inverse_temperature) {
  return fminf(inverse_temperature * kLog2E, kLargest);
}

// Masses are integers: their sums have no order. Four neighbours are added as floats, every sum of
// these is exact. The cut is 2^-50 of the largest weight.
constexpr float kUnit = 0x1p50f;

inline __device__ int64_t units_of(float weight) { return static_cast<int64_t>(weight * kUnit); }

inline __device__ int64_t quad_units(const float (&w)[kPerLane], int quad) {
  return units_of((w[quad * 4] + w[quad * 4 + 1]) + (w[quad * 4 + 2] + w[quad * 4 + 3]));
}

inline __device__ int64_t lane_units(const float (&w)[kPerLane]) {
  int64_t sum = 0;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) sum += quad_units(w, q);
  return sum;
}

// A power of two near the largest of non-negative weights, and its inverse: both normal floats.
inline __device__ float scale_of(float top) {
  const uint32_t exponent = bits_as<uint32_t>(top) & 0x7f800000u;
  return bits_as<float>(exponent < 0x00800000u   ? 0x00800000u
                        : exponent > 0x7e800000u ? 0x7e800000u
                                                 : exponent);
}
inline __device__ float inverse_scale(float scale) {
  return bits_as<float>(0x7f000000u - bits_as<uint32_t>(scale));
}

inline __device__ int64_t warp_sum(int64_t value) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

// A value that is larger for a better score, then for a lower index; scores are not negative.
inline __device__ uint64_t ranked(float score, int index) {
  return uint64_t{bits_as<uint32_t>(score)} << 32 | static_cast<uint32_t>(kSpan - 1 - index);
}
inline __device__ float score_of(uint64_t rank) {
  return bits_as<float>(static_cast<uint32_t>(rank >> 32));
}
inline __device__ int index_of(uint64_t rank) {
  return kSpan - 1 - static_cast<int>(static_cast<uint32_t>(rank));
}

inline __device__ uint64_t warp_best(uint64_t value) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, value, step);
    value = other > value ? other : value;
  }
  return value;
}

struct RaceNoise {
  uint64_t seed;
  uint64_t position;
  uint32_t stream;
};

// E = -log1p(-u), u = (x + 1/2) / 2^32: each half of the range keeps its relative precision. Where
// x < 256, 32 more bits; -log1p(-u) is u there, to the last bit of a float.
inline __device__ float exponential(uint32_t x, int word, const RaceNoise& noise, uint32_t lane) {
  if (x < 256) {
    const Words more =
        philox(noise.seed, lane, noise.position, noise.stream + uint32_t{kTailStreams});
    const uint32_t low = word == 0   ? more.word[0]
                         : word == 1 ? more.word[1]
                         : word == 2 ? more.word[2]
                                     : more.word[3];
    return static_cast<float>((x * 0x1p32 + low + 0.5) * 0x1p-64);
  }
  const bool upper = x >> 31;
  const float h = (static_cast<float>(upper ? ~x : x) + 0.5f) * 0x1p-32f;
  return upper ? -logf(h) : -log1pf(-h);
}

// The best of w / E in a span, ranked; 0 if nothing has weight.
inline __device__ uint64_t span_race(float (&w)[kPerLane], bool wide, int64_t span,
                                     const RaceNoise& noise) {
  uint64_t best = 0;
#pragma unroll 1
  for (int q = 0; q < kQuads; ++q) {
    const int first = first_of_quad(wide, q);
    const auto lane = static_cast<uint32_t>((span * kSpan + first) / 4);
    const Words x = philox(noise.seed, lane, noise.position, noise.stream);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (w[j] > 0) {
        const uint64_t rank = ranked(w[j] / exponential(x.word[j], j, noise, lane), first + j);
        best = rank > best ? rank : best;
      }
    }
    rotate(w);
  }
  return warp_best(best);
}

// Index in the span of the first entry whose running sum of units passes `target`; else of the last
// one with weight. In every lane.
inline __device__ int span_pick(const float (&w)[kPerLane], bool wide, int64_t target) {
  const bool pair = !wide;  // two quads of a lane are neighbours
  int64_t running = 0;
  int chosen = -1, last = -1;  // elements of this lane
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int64_t mine = quad_units(w, q);
    const int64_t whole = pair ? mine + quad_units(w, q ^ 1) : mine;
    int64_t upto = whole;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, upto, step);
      if (lane_id() >= step) upto += other;
    }
    const int64_t all = __shfl_sync(kAllLanes, upto, kLanes - 1);
    const int64_t before = running + upto - (pair && q % 2 ? mine : whole);
    const bool here = before <= target && target < before + mine;
    float sum = 0;
#pragma unroll
    for (int j = q * 4; j < q * 4 + 4; ++j) {
      sum += w[j];
      if (w[j] > 0) last = j;
      if (here && chosen < 0 && before + units_of(sum) > target) chosen = j;
    }
    // Added one by one the four may stay under their sum.
    if (here && chosen < 0) chosen = last;
    if (!pair || q % 2) running += all;
  }
  const int none = kSpan;
  const int mine = chosen < 0 ? none : place(wide, chosen);
  const auto found = static_cast<int>(~warp_max(~static_cast<uint32_t>(mine)));
  if (found < none) return found;
  const int end = last < 0 ? 0 : place(wide, last) + 1;
  return static_cast<int>(warp_max(static_cast<uint32_t>(end))) - 1;
}

}  // namespace specdec
