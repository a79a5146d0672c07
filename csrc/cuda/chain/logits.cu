// The kernel of verify_chain for the ratio test on logits without filters.
#include "cuda/chain/kernel.cuh"
#include "cuda/chain/kernels.cuh"

namespace specdec::cuda {

ChainKernel logits_chain_kernel() {
  static Devices devices;
  return {chain_kernel<Variant::kLogits>, blocks_per_processor(Variant::kLogits), &devices};
}

}  // namespace specdec::cuda
