// The kernel of verify_chain for the ratio test on probabilities without filters.
#include "cuda/chain/kernel.cuh"
#include "cuda/chain/kernels.cuh"

namespace specdec::cuda {

ChainKernel probs_chain_kernel() {
  return {chain_kernel<Variant::kProbs>, blocks_per_processor(Variant::kProbs)};
}

}  // namespace specdec::cuda
