#pragma once
// Names of independent noise. docs/rules.md#noise says which op draws from which stream.
#include <cstdint>

namespace specdec {

// The last counter word of Philox: equal seeds and positions give independent noise in each stream.
enum NoiseStream : uint32_t {
  kAcceptStream = 0,    // acceptance uniforms
  kResidualStream = 1,  // recovered and bonus tokens
  kDraftStream = 2,
  kSharedStream = 3,   // Gumbel noise that drafter and target share
  kTailStreams = 256,  // added to a stream: 32 more bits of the same noise
};

// Identifies the Gumbel noise of one row; each token has a word of it.
struct GumbelNoise {
  uint64_t seed;
  uint64_t position;
  uint32_t stream;
};

}  // namespace specdec
