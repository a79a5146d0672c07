#pragma once
// The kernels of verify_chain, each compiled by itself.
#include "cuda/chain/view.cuh"
#include "cuda/launch.cuh"

namespace specdec::cuda {

using ChainKernel = GroupKernel<ChainJob>;

// In kernel.cuh.
template <Variant kVariant>
ChainKernel& chain_kernel_of();

}  // namespace specdec::cuda
