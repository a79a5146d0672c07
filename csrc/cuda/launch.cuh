#pragma once
// Host side of a launch: how rows are split, the memory of a call, the id of the launch.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <random>

#include "cuda/row/distribution.cuh"
#include "cuda/ticket.cuh"
#include "specdec/verification.h"

namespace specdec::cuda {

inline int64_t warp_tiles_of(int64_t vocab) { return (vocab + kWarpTile - 1) / kWarpTile; }

// The warp tiles of a target or draft row, whichever is longer.
inline int64_t warp_tiles_of(const VerifyParams& p) {
  return warp_tiles_of(std::max(p.vocab, p.draft.vocab));
}

// Whether the best entry of a row may be needed, by Gumbel-max sampling or as the maximum.
inline bool needs_best(const SamplingParams& s, bool gumbel) {
  return gumbel || s.temperatures != nullptr || s.temperature == 0;
}

// Whether some sequence may have a filter.
inline bool may_filter(const SamplingParams& s, int64_t vocab) {
  return s.top_ks != nullptr || s.top_ps != nullptr || s.min_ps != nullptr ||
         SequenceParams{1, s.top_k, s.top_p, s.min_p}.filters(vocab);
}

template <class OpParams>
bool needs_best(const OpParams& p) {
  using RuleOf = decltype(p.rule);
  return needs_best(p.sampling, p.rule == RuleOf::kMatch || p.rule == RuleOf::kGreedy);
}

template <class OpParams>
bool filters(const OpParams& p) {
  return p.rule != decltype(p.rule)::kGreedy && may_filter(p.sampling, p.vocab);
}

template <class OpParams>
bool measures_drafts(const OpParams& p) {
  return p.reads_draft() && p.kind == Kind::kLogits && p.draft.form == DraftForm::kRows;
}

// The multiprocessors of the current device, asked once of each.
inline cudaError_t multiprocessors(int* processors) {
  constexpr int kKnown = 64;
  static std::atomic<int> known[kKnown] = {};
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device < kKnown && known[device] != 0) {
    *processors = known[device];
    return cudaSuccess;
  }
  status = cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess && device < kKnown) known[device] = *processors;
  return status;
}

// Into how many splits each of `units` rows is divided: so that a multiprocessor gets eight blocks,
// twice as many as it runs at once, but no split has less than a warp tile for each warp.
inline int splits_of(int processors, int64_t units, int64_t warp_tiles) {
  const int64_t wanted = int64_t{processors} * 8 / std::max<int64_t>(units, 1);
  const int64_t useful = (warp_tiles + kWarps - 1) / kWarps;
  return static_cast<int>(std::clamp<int64_t>(std::min(wanted, useful), 1, kMostArrivals));
}

// Lays arrays out in the workspace of a call, each from a line of 64 bytes on. Without a workspace
// it counts bytes alone.
class Layout {
 public:
  // The workspace may begin anywhere, for which `bytes` has room.
  explicit Layout(char* workspace) : memory_(workspace) {
    if (memory_ == nullptr) return;
    memory_ += (kLine - reinterpret_cast<uintptr_t>(memory_) % kLine) % kLine;
  }

  // Null if there is none.
  template <class T>
  void array(T*& out, int64_t number) {
    char* const at = take(number * static_cast<int64_t>(sizeof(T)));
    out = number == 0 ? nullptr : reinterpret_cast<T*>(at);
  }
  TileStatsArray statistics(int64_t number, int64_t warp_tiles, bool has_best) {
    return {take(number * TileStatsArray::bytes(warp_tiles, has_best)), warp_tiles, has_best};
  }
  int64_t bytes() const { return bytes_ + kLine; }

 private:
  static constexpr int64_t kLine = 64;

  char* take(int64_t bytes) {
    char* const at = memory_ == nullptr ? nullptr : memory_ + bytes_;
    bytes_ += (bytes + kLine - 1) / kLine * kLine;
    return at;
  }

  char* memory_;
  int64_t bytes_ = 0;
};

template <class Job>
cudaError_t launch_blocks(void (*kernel)(Job), const Job& job, int64_t blocks, size_t shared_bytes,
                          void* stream) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, job);
}

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection.
inline uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// The id of a launch has 48 bits that memory is unlikely to hold by chance: the sequence of ids
// starts at random, and the upper byte is neither 0x00 nor 0xff, as in small integers.
inline uint64_t next_launch_id() {
  static std::atomic<uint64_t> count{uint64_t{std::random_device()()} << 32 ^
                                     std::random_device()()};
  for (;;) {
    const uint64_t id = mixed(count.fetch_add(1)) >> 16;
    if (id >> 40 != 0 && id >> 40 != 0xff) return id;
  }
}

}  // namespace specdec::cuda
