// The kernel of verify_chain for all rules and filters.
#include "cuda/chain/kernel.cuh"
#include "cuda/chain/kernels.cuh"

namespace specdec::cuda {

ChainKernel general_chain_kernel() {
  static Devices devices;
  return {chain_kernel<Variant::kGeneral>, blocks_per_processor(Variant::kGeneral), &devices};
}

}  // namespace specdec::cuda
