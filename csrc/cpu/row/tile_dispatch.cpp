#include <algorithm>
#include <cfloat>

#include "cpu/capability.h"
#include "cpu/row/tile.h"

namespace specdec::cpu {

float weight_floor(const WeightParams& s) {
  const float reach = std::min(-kSmallestExponent / s.inv_t, FLT_MAX);
  return std::max({s.threshold, s.offset - reach, -FLT_MAX});
}

extern const TileKernels tile_kernels_plain;
#ifdef __x86_64__
extern const TileKernels tile_kernels_avx2;
extern const TileKernels tile_kernels_avx512;
#endif

const TileKernels& tile_kernels() {
#ifdef __x86_64__
  if (capability() >= Capability::kAvx512) return tile_kernels_avx512;
  if (capability() == Capability::kAvx2) return tile_kernels_avx2;
#endif
  return tile_kernels_plain;
}

}  // namespace specdec::cpu
