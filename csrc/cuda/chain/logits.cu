// The kernel of verify_chain for the ratio test on logits without filters.
#include "cuda/chain/kernel.cuh"
#include "cuda/chain/kernels.cuh"

namespace specdec::cuda {

ChainKernel logits_chain_kernel() {
  return {chain_kernel<Variant::kLogits>, blocks_per_processor(Variant::kLogits)};
}

}  // namespace specdec::cuda
