#pragma once
// The kernels of verify_chain, each compiled by itself.
#include "cuda/chain/view.cuh"
#include "cuda/launch.cuh"

namespace specdec::cuda {

using ChainKernel = GroupKernel<ChainJob>;

// In kernel.cuh.
template <Variant kVariant>
ChainKernel& chain_kernel_of();

inline ChainKernel& chain_kernel_of(Variant variant) {
  return variant == Variant::kLogits  ? chain_kernel_of<Variant::kLogits>()
         : variant == Variant::kProbs ? chain_kernel_of<Variant::kProbs>()
                                      : chain_kernel_of<Variant::kGeneral>();
}

}  // namespace specdec::cuda
