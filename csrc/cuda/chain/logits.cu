// The kernel of verify_chain for the ratio test on logits without filters.
#include "cuda/chain/kernel.cuh"

template specdec::cuda::ChainKernel&
specdec::cuda::chain_kernel_of<specdec::cuda::Variant::kLogits>();
