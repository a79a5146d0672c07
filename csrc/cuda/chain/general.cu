// The kernel of verify_chain for all rules and filters.
#include "cuda/chain/kernel.cuh"

template specdec::cuda::ChainKernel&
specdec::cuda::chain_kernel_of<specdec::cuda::Variant::kGeneral>();
