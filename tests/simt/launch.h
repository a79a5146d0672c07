#pragma once
// A launch: it is checked as a device would check it, then runs one wave of blocks after another.
#include <algorithm>
#include <numeric>
#include <vector>

#include "barrier.h"
#include "host.h"
#include "shared.h"
#include "warp.h"

namespace simt {

inline uint64_t volume(const dim3& d) { return uint64_t{d.x} * d.y * d.z; }
inline dim3 place(uint64_t i, const dim3& size) {
  return dim3(static_cast<unsigned>(i % size.x), static_cast<unsigned>(i / size.x % size.y),
              static_cast<unsigned>(i / size.x / size.y));
}

inline cudaError_t check(const cudaLaunchConfig_t& c, size_t parameter_bytes) {
  const dim3 &grid = c.gridDim, &block = c.blockDim;
  const uint64_t threads = volume(block);
  if (volume(grid) == 0 || threads == 0 || threads > 1024 || block.z > 64 || grid.x >= 1u << 31 ||
      grid.y > 65535 || grid.z > 65535 || parameter_bytes > 32764) {
    return cudaErrorInvalidConfiguration;
  }
  return c.dynamicSmemBytes > kMostShared ? cudaErrorInvalidValue : cudaSuccess;
}

// The blocks that run at the same time.
class Wave {
 public:
  explicit Wave(const cudaLaunchConfig_t& config)
      : config_(config),
        blocks_(std::min<uint64_t>(blocks_at_once, volume(config.gridDim))),
        warps_(blocks_.size() * warps_per_block()) {
    scheduler.threads.assign(blocks_.size() * volume(config.blockDim), Thread{});
    Thread* thread = scheduler.threads.data();
    shared_pool.prepare(blocks_, config.dynamicSmemBytes);
    for (size_t b = 0; b < blocks_.size(); ++b) {
      blocks_[b].warps = &warps_[b * warps_per_block()];
      for (unsigned t = 0; t < volume(config.blockDim); ++t) {
        *thread++ = {&blocks_[b], nullptr, nullptr, place(t, config.blockDim), t, nullptr};
      }
    }
  }

  size_t blocks_at_most() const { return blocks_.size(); }

  // Chooses the blocks of the wave; the last wave of a launch may have fewer than the others.
  void place_at(const uint64_t* numbers, size_t count) {
    const unsigned threads = static_cast<unsigned>(volume(config_.blockDim));
    scheduler.threads.resize(count * threads);
    for (size_t b = 0; b < count; ++b) {
      Block& block = blocks_[b];
      block.barrier = {&scheduler.threads[b * threads], threads};
      block.index = place(numbers[b], config_.gridDim);
      for (unsigned t = 0; t < threads; t += 32) {
        Warp& warp = block.warps[t / 32];
        warp.first = block.barrier.first + t;
        warp.alive = threads - t < 32 ? (1u << (threads - t)) - 1 : ~0u;
        warp.waiting = 0;
      }
    }
  }

 private:
  size_t warps_per_block() const { return (volume(config_.blockDim) + 31) / 32; }

  const cudaLaunchConfig_t& config_;
  std::vector<Block> blocks_;
  std::vector<Warp> warps_;
};

inline void thread_returned(Thread& t) {
  Block& block = *t.block;
  leave(warp_of(t), t);
  leave(block.barrier, t);
  if (block.barrier.returned == block.barrier.threads) shared_pool.close(block);
}

SIMT_UNWATCHED inline cudaError_t run(const cudaLaunchConfig_t& config, Scheduler::Body body,
                                      const void* context) {
  ++launches;
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  scheduler.seed(shuffle_seed);
  scheduler.returned = thread_returned;
  scheduler.failure.clear();
  Wave wave(config);
  std::vector<uint64_t> order(volume(config.gridDim));
  std::iota(order.begin(), order.end(), 0);
  scheduler.shuffle(order);
  const bool last_first = reverse && !shuffle_seed;
  for (size_t left = order.size(), size = wave.blocks_at_most(); left > 0; left -= size) {
    size = std::min(size, left);
    wave.place_at(&order[last_first ? left - size : order.size() - left], size);
    if (!scheduler.run(body, context)) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

}  // namespace simt

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  const cudaError_t status = simt::check(*config, (sizeof(Params) + ... + 0));
  if (status != cudaSuccess) return simt::report(status);
  const auto body = [&] { kernel(args...); };
  using Body = decltype(body);
  return simt::report(simt::run(*config, [](const void* f) { (*static_cast<Body*>(f))(); }, &body));
}
