#include "cuda/kv/slots.cuh"

namespace specdec::cuda {

int kv_truncate(const KvTruncateParams& p, void* stream) {
  return truncate<dropped_slots>(p, stream);
}

}  // namespace specdec::cuda
