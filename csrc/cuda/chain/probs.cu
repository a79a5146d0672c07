// The kernel of verify_chain for the ratio test on probabilities without filters, at temperature 0
// or 1.
#include "cuda/chain/kernel.cuh"
#include "cuda/chain/kernels.cuh"

namespace specdec::cuda {

ChainKernel probs_chain_kernel() {
  static Devices devices;
  return {chain_kernel<Variant::kProbs>, blocks_per_processor(Variant::kProbs), &devices};
}

}  // namespace specdec::cuda
