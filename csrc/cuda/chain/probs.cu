// The kernel of verify_chain for the ratio test on probabilities without filters, at temperature 0
// or 1.
#include "cuda/chain/kernel.cuh"

template specdec::cuda::ChainKernel&
specdec::cuda::chain_kernel_of<specdec::cuda::Variant::kProbs>();
