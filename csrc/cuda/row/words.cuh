#pragma once
// A whole warp tile at an aligned address, for loops that know the dtype at compile time.
#include "cuda/row/weights.cuh"

namespace specdec::cuda {

// Keeps the compiler from adding up the parts of an address again at each use.
inline __device__ const char* whole_address(const char* address) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(address));
#endif
  return address;
}

// The elements of a lane as they lie in memory.
template <DType kType>
struct Words {
  static constexpr bool kWide = kType == DType::kFloat32;
  static constexpr int kCount = kWide ? kPerLane : kPerLane / 2;
  uint32_t word[kCount];

  // Loads a whole warp tile; `lane` is the address of this lane's first element in the row.
  __device__ void load(const char* lane, int warp_tile) {
    constexpr int kBytes = kWarpTile * (kWide ? 4 : 2);
    const auto* const from = reinterpret_cast<const uint4*>(lane + int64_t{warp_tile} * kBytes);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      load_words(word + i * 4, from + i * kLanes);
    }
  }

  __device__ float operator[](int j) const { return element_of<kType>(word, j); }

  // The largest element of this lane as an unsigned integer.
  __device__ uint32_t max_bits() const {
    uint32_t best = word[0];
#pragma unroll
    for (int w = 1; w < kCount; ++w) best = word[w] > best ? word[w] : best;
    return best;
  }

  // The largest element of this lane, NaN if one is.
  __device__ float max() const {
    if constexpr (kWide) {
      float best = (*this)[0];
#pragma unroll
      for (int j = 1; j < kPerLane; ++j) best = max_or_nan(best, (*this)[j]);
      return best;
    } else {
      Words best;
      best.word[0] = word[0];
#pragma unroll
      for (int w = 1; w < kCount; ++w) best.word[0] = max_of_pairs<kType>(best.word[0], word[w]);
      return max_or_nan(best[0], best[1]);
    }
  }
};

// The same for a 16-bit row at another address: the aligned words around each 16 bytes of a lane,
// from which `shifted` takes those of the lane. The first begin before the row, in the 16 bytes
// that hold its first element; the last end up to kBeyondTile elements after the warp tile.
constexpr int kBeyondTile = 7;

template <DType kType>
struct UnalignedWords {
  static constexpr int kPieces = kPerLane / 8;
  uint32_t word[kPieces][8];

  // `lane` is the multiple of 16 bytes before this lane's first element.
  __device__ void load(const char* lane, int warp_tile) {
    const auto* const from =
        reinterpret_cast<const uint4*>(lane + int64_t{warp_tile} * (kWarpTile * 2));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      load_words(word[i], from + i * kLanes);
      load_words(word[i] + 4, from + i * kLanes + 1);
    }
  }

  // The elements from byte `begin` of the words on, which is the same in all lanes.
  __device__ Words<kType> shifted(unsigned begin) const {
    const bool two = (begin & 8) != 0, one = (begin & 4) != 0;
    Words<kType> out;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint32_t from[6];
#pragma unroll
      for (int w = 0; w < 6; ++w) from[w] = two ? word[i][w + 2] : word[i][w];
#pragma unroll
      for (int w = 0; w < 5; ++w) from[w] = one ? from[w + 1] : from[w];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        out.word[i * 4 + w] = __funnelshift_r(from[w], from[w + 1], begin % 4 * 8);
      }
    }
    return out;
  }
};

template <DType kType>
inline __device__ const Words<kType>& lane_words(const Words<kType>& words, unsigned) {
  return words;
}
template <DType kType>
inline __device__ Words<kType> lane_words(const UnalignedWords<kType>& words, unsigned begin) {
  return words.shifted(begin);
}

}  // namespace specdec::cuda
