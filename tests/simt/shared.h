#pragma once
// Dynamic shared memory. It is poisoned before a block starts, and lies between canaries.
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

}  // namespace simt
