#pragma once
// Philox4x32-10 (Salmon et al. 2011) and the uniforms that the ops draw.
#include <cstdint>

#include "specdec/host_device.h"
#include "specdec/noise.h"

namespace specdec {

struct Words {
  uint32_t word[4];
};

constexpr uint32_t kPhiloxMul0 = 0xD2511F53u, kPhiloxMul1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

SPECDEC_HD inline Words philox(uint64_t seed, uint32_t counter, uint64_t position,
                               uint32_t stream) {
  uint32_t c0 = counter, c1 = static_cast<uint32_t>(position),
           c2 = static_cast<uint32_t>(position >> 32), c3 = stream;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxMul0} * c0, b = uint64_t{kPhiloxMul1} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// In [0, 1), a multiple of 2^-53.
SPECDEC_HD SPECDEC_NOINLINE inline double uniform(uint64_t seed, uint64_t position, uint32_t stream,
                                                  uint32_t counter = 0) {
  const Words w = philox(seed, counter, position, stream);
  const uint64_t pair = uint64_t{w.word[0]} | uint64_t{w.word[1]} << 32;
  return static_cast<double>(pair >> 11) * 0x1p-53;
}

}  // namespace specdec
