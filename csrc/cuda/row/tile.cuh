#pragma once
// One warp tile: the 512 entries of a row that a warp reads at once, 16 in each lane. The map from
// entries to lanes depends on the dtype alone.
#include <cmath>
#include <type_traits>

#include "cuda/thread_block.cuh"
#include "specdec/host_device.h"
#include "specdec/math.h"
#include "specdec/sampling.h"

namespace specdec::cuda {

constexpr int kWarpTile = 512;
constexpr int kPerLane = kWarpTile / kLanes;
constexpr int kQuads = kPerLane / 4;
static_assert(kTile % kWarpTile == 0, "warp tiles divide tiles");

// A negative probability is read as NaN.
struct RowView {
  const void* data;
  const uint32_t* allowed;  // words of a bitmask, null if all tokens are allowed
  int32_t first;            // the bit of the first entry in it
  int64_t vocab;
  DType dtype;
  Read read;

  RowView() = default;
  __device__ RowView(const Rows& rows, int64_t sequence, int64_t row, int64_t vocab,
                     Read read = Read::kLogits)
      : allowed(rows.allowed.row(sequence, row)),
        first(0),
        vocab(vocab),
        dtype(rows.dtype),
        read(read) {
    data = address(rows.data, sequence * rows.stride_sequence + row * rows.stride_row);
  }

  // The same row without its first `skip` elements, and no longer than `size`.
  __device__ RowView part(int64_t skip, int64_t size) const {
    RowView out = *this;
    out.data = address(data, skip);
    out.first = first + static_cast<int32_t>(skip);
    out.vocab = vocab - skip < size ? vocab - skip : size;
    return out;
  }

  __device__ int64_t warp_tiles() const { return (vocab + kWarpTile - 1) / kWarpTile; }
  __device__ bool aligned() const { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
  __device__ bool wide() const { return dtype == DType::kFloat32; }

 private:
  __device__ const void* address(const void* from, int64_t elements) const {
    return static_cast<const char*>(from) + elements * (wide() ? 4 : 2);
  }
};

// A dtype as an argument from which a template deduces it.
template <DType kType>
using DTypeOf = std::integral_constant<DType, kType>;

// What f returns for such an argument.
template <class F>
__forceinline__ __device__ auto with_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(DTypeOf<DType::kFloat32>());
    case DType::kBFloat16:
      return f(DTypeOf<DType::kBFloat16>());
    default:
      return f(DTypeOf<DType::kFloat16>());
  }
}

// How many neighbours a lane holds in a row: a lane loads 16 bytes at once.
SPECDEC_HD constexpr int run_of(bool wide) { return wide ? 4 : 8; }

// The lane that holds entry `index` of a warp tile, and which of its elements that is.
inline __device__ int holder(bool wide, int index) {
  return wide ? index % 128 / 4 : index % 256 / 8;
}
inline __device__ int element(bool wide, int index) {
  return wide ? index / 128 * 4 + index % 4 : index / 256 * 8 + index % 8;
}

// The elements of a lane as they lie in memory; 16-bit dtypes fill half of it.
struct Packed {
  uint32_t word[kPerLane];
};

// The index in the warp tile of element j of this lane. A lane holds runs of four neighbours of
// float32, of eight of the 16-bit dtypes.
inline __device__ int place(bool wide, int j) {
  return wide ? j / 4 * 128 + lane_id() * 4 + j % 4 : j / 8 * 256 + lane_id() * 8 + j % 8;
}
inline __device__ int first_of_quad(bool wide, int quad) { return place(wide, quad * 4); }

inline __device__ float from_bfloat16(uint32_t h) { return bits_as<float>(h << 16); }

// The multiplication corrects the bias of the exponent, also for subnormals.
inline __device__ float from_float16(uint32_t h) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(h)));
  return value;
#else
  const float magnitude = bits_as<float>((h & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
  return bits_as<float>(bits_as<uint32_t>(magnitude) | special | (h & 0x8000u) << 16);
#endif
}

template <DType kType>
inline __device__ float from_bits(uint32_t h) {
  return kType == DType::kBFloat16 ? from_bfloat16(h) : from_float16(h);
}

// Element j of the words that a lane holds.
template <DType kType>
inline __device__ float element_of(const uint32_t* word, int j) {
  if constexpr (kType == DType::kFloat32) {
    return bits_as<float>(word[j]);
  } else if constexpr (kType == DType::kBFloat16) {
    return bits_as<float>(j % 2 != 0 ? word[j / 2] & 0xffff0000u : word[j / 2] << 16);
  } else {
    return from_float16(word[j / 2] >> (j % 2 * 16) & 0xffffu);
  }
}

// Loads the four words at an address.
inline __device__ void load_words(uint32_t* word, const uint4* from) {
  const uint4 v = __ldg(from);
  word[0] = v.x;
  word[1] = v.y;
  word[2] = v.z;
  word[3] = v.w;
}

inline __device__ float as_wanted(Read read, float value) {
  if (read == Read::kLogOfProbs) return log_of(value);
  return read == Read::kProbs && !(value >= 0) ? NAN : value;
}

inline SPECDEC_NOINLINE __device__ bool call_is_allowed(const uint32_t* words, int64_t bit) {
  return is_allowed(words, bit);
}

inline __device__ float at(const RowView& row, int64_t index) {
  if (row.allowed != nullptr && !call_is_allowed(row.allowed, row.first + index)) {
    return entry_not_allowed(row.read);
  }
  float value;
  if (row.dtype == DType::kFloat32) {
    value = __ldg(static_cast<const float*>(row.data) + index);
  } else {
    const uint32_t h = __ldg(static_cast<const uint16_t*>(row.data) + index);
    value = row.dtype == DType::kBFloat16 ? from_bfloat16(h) : from_float16(h);
  }
  return as_wanted(row.read, value);
}

// Loads sixteen bytes at a time if the alignment allows it, else one element at a time into the
// same lanes. `fill` holds the bits of entries beyond the end.
template <class T>
inline __device__ void load_elements(const RowView& row, int64_t begin, uint32_t fill,
                                     Packed& out) {
  constexpr int kPerLoad = 16 / sizeof(T), kPerWord = 4 / sizeof(T);
  // An undefined half would keep its registers from one warp tile to the next.
#pragma unroll
  for (int w = kPerLane / kPerWord; w < kPerLane; ++w) out.word[w] = 0;
  const T* const data = static_cast<const T*>(row.data) + begin + lane_id() * kPerLoad;
  const int64_t remaining = row.vocab - begin - lane_id() * kPerLoad;
  if (row.aligned() && row.vocab - begin >= kWarpTile) {
#pragma unroll
    for (int load = 0; load < kPerLane / kPerLoad; ++load) {
      load_words(out.word + load * 4,
                 reinterpret_cast<const uint4*>(data + load * kLanes * kPerLoad));
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
      if (first + j < remaining) {
        if constexpr (kPerWord == 1) {
          bits = bits_as<uint32_t>(__ldg(data + first));
        } else {
          bits = __ldg(data + first + j);
        }
      }
      word |= bits << (j * 16);
    }
    out.word[w] = word;
  }
}

// Entries beyond the end get no weight: they are -inf, or probability 0.
inline __device__ void load_warp_tile(const RowView& row, int64_t warp_tile, Packed& out) {
  const bool probabilities = row.read != Read::kLogits;
  const int64_t begin = warp_tile * kWarpTile;
  if (row.dtype == DType::kFloat32) {
    load_elements<float>(row, begin, probabilities ? 0 : 0xff800000u, out);
  } else {
    const uint32_t minus_inf = row.dtype == DType::kBFloat16 ? 0xff80u : 0xfc00u;
    load_elements<uint16_t>(row, begin, probabilities ? 0 : minus_inf, out);
  }
}

// Moves the next quad to the front and the first one to the end: a loop that rotates its values
// needs registers for the work on one quad instead of four.
inline __device__ void rotate(float (&values)[kPerLane]) {
  const float first[4] = {values[0], values[1], values[2], values[3]};
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) values[j] = j + 4 < kPerLane ? values[j + 4] : first[j % 4];
}

// Gives the entries of tokens that are not allowed no weight. A quad at a time, for the sake of
// registers; its bits lie in two neighbouring bytes.
inline __device__ void keep_allowed(const RowView& row, int64_t warp_tile, float (&out)[kPerLane]) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(row.allowed);
  const auto first = static_cast<unsigned>(row.first + warp_tile * kWarpTile),
             end = static_cast<unsigned>(row.first + row.vocab);
#pragma unroll 1
  for (int quad = 0; quad < kQuads; ++quad) {
    const unsigned bit = first + first_of_quad(row.wide(), quad);
    uint32_t bits = bit < end ? __ldg(bytes + bit / 8) : 0;
    if (bit / 8 * 8 + 8 < end) bits |= __ldg(bytes + bit / 8 + 1) << 8;
    bits >>= bit % 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] = bits >> j & 1 ? out[j] : entry_not_allowed(row.read);
    rotate(out);
  }
}

inline __device__ void unpack(const RowView& row, int64_t warp_tile, const Packed& in,
                              float (&out)[kPerLane]) {
  with_dtype(row.dtype, [&](auto type) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) out[j] = element_of<decltype(type)::value>(in.word, j);
  });
  if (row.read == Read::kLogOfProbs) {
#pragma unroll 1
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = log_of(out[j]);
      rotate(out);
    }
  } else if (row.read == Read::kProbs) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) out[j] = out[j] >= 0 ? out[j] : NAN;
  }
  if (row.allowed != nullptr) keep_allowed(row, warp_tile, out);
}

struct TileValues {
  float values[kPerLane];
};

// A function that is called: inlined, the code that reads any row would be a large part of a kernel
// that needs it at several places. All arguments and results are in registers.
inline SPECDEC_NOINLINE __device__ TileValues call_read_warp_tile(const void* data,
                                                                  const uint32_t* allowed,
                                                                  int first, int vocab, DType dtype,
                                                                  Read read, int warp_tile) {
  RowView row;
  row.data = data;
  row.allowed = allowed;
  row.first = first;
  row.vocab = vocab;
  row.dtype = dtype;
  row.read = read;
  Packed packed;
  load_warp_tile(row, warp_tile, packed);
  TileValues out;
  unpack(row, warp_tile, packed, out.values);
  return out;
}

inline __device__ TileValues call_read_warp_tile(const RowView& row, int64_t warp_tile) {
  return call_read_warp_tile(row.data, row.allowed, static_cast<int>(row.first),
                             static_cast<int>(row.vocab), row.dtype, row.read,
                             static_cast<int>(warp_tile));
}

}  // namespace specdec::cuda
