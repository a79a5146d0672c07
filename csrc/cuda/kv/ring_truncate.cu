#include "cuda/kv/slots.cuh"

namespace specdec::cuda {

int ring_truncate(const RingTruncateParams& p, void* stream) {
  return truncate<dropped_ring_slots>(p, stream);
}

}  // namespace specdec::cuda
