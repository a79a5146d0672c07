#pragma once
// Dynamic shared memory. It is poisoned before a block starts, lies between canaries, and must not
// be written after its block has returned, when a device may give it to another block.
#include <cstring>

#include "schedule.h"

namespace simt {

class SharedPool {
 public:
  // A buffer for each block of a wave.
  void prepare(std::vector<Block>& blocks, size_t bytes) {
    bytes_ = bytes;
    const size_t stride = (kFront + bytes + kBack + kAlignment - 1) / kAlignment * kAlignment;
    memory_.assign(stride * blocks.size() + kAlignment, kCanary);
    const size_t skew = reinterpret_cast<uintptr_t>(memory_.data()) % kAlignment;
    unsigned char* at = memory_.data() + (kAlignment - skew) + kFront;
    for (Block& block : blocks) {
      block.shared = at;
      std::memset(at, kPoison, bytes);
      at += stride;
    }
  }

  // All threads of the block have returned.
  void close(const Block& block) {
    const unsigned char* const p = block.shared;
    if (all(p - kFront, kFront, kCanary) && all(p + bytes_, kBack, kCanary)) {
      std::memset(block.shared, kPoison, bytes_);
      return;
    }
    size_t at = 0;
    while (at < kBack && p[bytes_ + at] == kCanary) ++at;
    scheduler.fail("block " + text(block.index) + " wrote " +
                   (at == kBack ? "before" : "at byte " + std::to_string(bytes_ + at) + " of") +
                   " its shared memory, which has " + std::to_string(bytes_) + " bytes");
  }

  // All blocks of the wave have returned.
  std::string written_too_late(const std::vector<Block>& blocks) const {
    for (const Block& block : blocks) {
      if (all(block.shared, bytes_, kPoison)) continue;
      return "the shared memory of block " + text(block.index) +
             " was written after the block had returned";
    }
    return {};
  }

  size_t bytes() const { return bytes_; }

 private:
  static constexpr unsigned char kPoison = 0xFF, kCanary = 0xA5;
  static constexpr size_t kAlignment = 128, kFront = 128, kBack = 1024;

  static bool all(const unsigned char* p, size_t bytes, unsigned char value) {
    return bytes == 0 || (p[0] == value && std::memcmp(p, p + 1, bytes - 1) == 0);
  }

  std::vector<unsigned char> memory_;
  size_t bytes_ = 0;
};

inline SharedPool shared_pool;

// The memory that `extern __shared__` names on a device.
inline unsigned char* shared_memory() { return scheduler.current->block->shared; }

// The address of the same variable in another block of the cluster.
inline unsigned char* remote_shared(const void* address, unsigned rank) {
  const Thread& self = *scheduler.current;
  const Cluster& cluster = *self.block->cluster;
  const size_t offset =
      reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(self.block->shared);
  if (rank >= cluster.size || offset >= shared_pool.bytes()) {
    scheduler.fail(text(self) +
                   " maps an address outside its shared memory, or a rank outside its"
                   " cluster");
  }
  const Block& other = cluster.blocks[rank];
  if (other.barrier.returned == other.barrier.threads) {
    scheduler.fail(text(self) + " maps the shared memory of block " + text(other.index) +
                   ", which has returned");
  }
  return other.shared + offset;
}

}  // namespace simt
