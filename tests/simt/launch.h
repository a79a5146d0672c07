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

struct WeightParams {
  dim3 grid, block, cluster;
  size_t shared;
};

inline uint64_t volume(const dim3& d) { return uint64_t{d.x} * d.y * d.z; }
inline dim3 place(uint64_t i, const dim3& size) {
  return dim3(static_cast<unsigned>(i % size.x), static_cast<unsigned>(i / size.x % size.y),
              static_cast<unsigned>(i / size.x / size.y));
}

inline WeightParams shape_of(const cudaLaunchConfig_t& config) {
  WeightParams shape = {config.gridDim, config.blockDim, dim3(), config.dynamicSmemBytes};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      const auto& c = attribute.val.clusterDim;
      shape.cluster = dim3(c.x, c.y, c.z);
    }
  }
  return shape;
}

inline int blocks_at_once(const WeightParams& shape) {
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, shape_of, static_cast<int>(volume(shape.block)), shape.shared);
  return blocks * multiprocessors;
}

inline cudaError_t check(const WeightParams& s, const FunctionLimits& limits,
                         size_t parameter_bytes) {
  const uint64_t threads = volume(s.block), cluster = volume(s.cluster);
  if (volume(s.grid) == 0 || threads == 0 || threads > 1024 || s.block.z > 64 ||
      s.grid.x >= 1u << 31 || s.grid.y > 65535 || s.grid.z > 65535 || parameter_bytes > 32764) {
    return cudaErrorInvalidConfiguration;
  }
  if (s.shared > static_cast<size_t>(limits.shared)) return cudaErrorInvalidValue;
  if (cluster == 0 || cluster > largest_cluster || cluster > (limits.large_cluster ? 16 : 8) ||
      (cluster > 1 && capability_major < 9)) {
    return cudaErrorInvalidClusterSize;
  }
  if (s.grid.x % s.cluster.x || s.grid.y % s.cluster.y || s.grid.z % s.cluster.z) {
    return cudaErrorInvalidClusterSize;
  }
  return cudaSuccess;
}

// The blocks that run at the same time, in `clusters_at_once` clusters.
class Wave {
 public:
  explicit Wave(const WeightParams& shape)
      : shape_(shape),
        clusters_of_grid_(shape.grid.x / shape.cluster.x, shape.grid.y / shape.cluster.y,
                          shape.grid.z / shape.cluster.z),
        clusters_(std::min<uint64_t>(clusters_at_once, volume(clusters_of_grid_))),
        blocks_(clusters_.size() * volume(shape.cluster)),
        warps_(blocks_.size() * warps_per_block()) {
    scheduler.threads.assign(blocks_.size() * volume(shape.block), Thread{});
    Thread* thread = scheduler.threads.data();
    shared_pool.prepare(blocks_, shape.shared);
    for (size_t b = 0; b < blocks_.size(); ++b) {
      blocks_[b].warps = &warps_[b * warps_per_block()];
      for (unsigned t = 0; t < volume(shape.block); ++t) {
        *thread++ = {&blocks_[b], nullptr, nullptr, place(t, shape.block),
                     t,           nullptr, false,   nullptr};
      }
    }
  }

  uint64_t clusters_of_launch() const { return volume(clusters_of_grid_); }
  size_t clusters_at_most() const { return clusters_.size(); }

  // Chooses the clusters of the wave; the last wave of a launch may have fewer than the others.
  void place_at(const uint64_t* numbers, size_t count) {
    const unsigned threads = static_cast<unsigned>(volume(shape_.block));
    const unsigned size = static_cast<unsigned>(volume(shape_.cluster));
    scheduler.threads.resize(count * size * threads);
    for (size_t c = 0; c < count; ++c) {
      const dim3 cluster = place(numbers[c], clusters_of_grid_);
      Thread* const first = &scheduler.threads[c * size * threads];
      clusters_[c] = {{first, size * threads}, &blocks_[c * size], size};
      for (unsigned rank = 0; rank < size; ++rank) {
        const dim3 inner = place(rank, shape_.cluster);
        Block& block = blocks_[c * size + rank];
        block.barrier = {first + rank * threads, threads};
        block.cluster = &clusters_[c];
        block.rank = rank;
        block.index =
            dim3(cluster.x * shape_.cluster.x + inner.x, cluster.y * shape_.cluster.y + inner.y,
                 cluster.z * shape_.cluster.z + inner.z);
        for (unsigned t = 0; t < threads; t += 32) {
          Warp& warp = block.warps[t / 32];
          warp.first = block.barrier.first + t;
          warp.alive = threads - t < 32 ? (1u << (threads - t)) - 1 : ~0u;
          warp.waiting = 0;
        }
      }
    }
  }

  std::string run(Scheduler::Body body, const void* context) {
    if (!scheduler.run(body, context)) return scheduler.failure;
    return shared_pool.written_too_late(blocks_);
  }

 private:
  size_t warps_per_block() const { return (volume(shape_.block) + 31) / 32; }

  const WeightParams shape_;
  const dim3 clusters_of_grid_;
  std::vector<Cluster> clusters_;
  std::vector<Block> blocks_;
  std::vector<Warp> warps_;
};

inline void thread_returned(Thread& t) {
  Block& block = *t.block;
  leave(warp_of(t), t);
  leave(block.barrier, t);
  leave(block.cluster->barrier, t);
  if (block.barrier.returned == block.barrier.threads) shared_pool.close(block);
}

SIMT_UNWATCHED inline cudaError_t run(const WeightParams& shape, Scheduler::Body body,
                                      const void* context) {
  ++launches;
  gridDim = shape.grid;
  blockDim = shape.block;
  scheduler.seed(shuffle_seed);
  scheduler.returned = thread_returned;
  scheduler.failure.clear();
  Wave wave(shape);
  std::vector<uint64_t> order(wave.clusters_of_launch());
  std::iota(order.begin(), order.end(), 0);
  scheduler.shuffle(order);
  const bool last_first = reverse && !shuffle_seed;
  for (size_t left = order.size(), size = wave.clusters_at_most(); left > 0; left -= size) {
    size = std::min(size, left);
    wave.place_at(&order[last_first ? left - size : order.size() - left], size);
    message = wave.run(body, context);
    if (!message.empty()) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

}  // namespace simt

template <class... SequenceParams, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(SequenceParams...),
                               Args&&... args) {
  const simt::WeightParams shape = simt::shape_of(*config);
  const cudaError_t status =
      simt::check(shape, simt::function_limits[reinterpret_cast<const void*>(kernel)],
                  (sizeof(SequenceParams) + ... + 0));
  if (status != cudaSuccess) return simt::report(status);
  const auto body = [&] { kernel(args...); };
  using Body = decltype(body);
  return simt::report(simt::run(shape, [](const void* f) { (*static_cast<Body*>(f))(); }, &body));
}

template <class F>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, F* function,
                                           const cudaLaunchConfig_t* config) {
  const simt::WeightParams shape = simt::shape_of(*config);
  const cudaError_t status =
      simt::check(shape, simt::function_limits[reinterpret_cast<const void*>(function)], 0);
  if (status != cudaSuccess) return simt::report(status);
  *clusters = simt::blocks_at_once(shape) / static_cast<int>(simt::volume(shape.cluster));
  return cudaSuccess;
}
