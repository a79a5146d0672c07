#include <algorithm>
#include <cfloat>
#include <cstdlib>
#include <cstring>

#include "cpu/row/tile.h"

namespace specdec::cpu {

float weight_floor(const WeightParams& s) {
  const float reach = std::min(-kSmallestExponent / s.inv_t, FLT_MAX);
  return std::max({s.threshold, s.offset - reach, -FLT_MAX});
}

extern const TileKernels tile_kernels_plain;
#ifdef SPECDEC_X86
extern const TileKernels tile_kernels_avx2;
extern const TileKernels tile_kernels_avx512;
#endif

const TileKernels& tile_kernels() {
  static const TileKernels& chosen = []() -> const TileKernels& {
#ifdef SPECDEC_X86
    // The variable may narrow the instruction set, never widen it beyond the processor's.
    const char* asked = std::getenv("SPECDEC_CPU_CAPABILITY");
    const bool plain = asked != nullptr && std::strcmp(asked, "plain") == 0;
    const bool narrow = plain || (asked != nullptr && std::strcmp(asked, "avx2") == 0);
    __builtin_cpu_init();
    if (!narrow && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return tile_kernels_avx512;
    }
    if (!plain && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
      return tile_kernels_avx2;
#endif
    return tile_kernels_plain;
  }();
  return chosen;
}

}  // namespace specdec::cpu
